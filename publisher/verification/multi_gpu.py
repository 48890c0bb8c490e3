"""A model too large for one GPU, its layers dealt over several by accelerate.

Inputs and outputs are on the first GPU. It refuses a model that the GPUs do not hold: what would go to main memory or
to the disk would take days to answer.
"""

from collections.abc import Mapping
from typing import Any

import torch

from publisher.errors import VerificationError, counted

_SHARE = 0.9  # of what is free, for weights: the rest is for activations


def spread_over_gpus(network: Any, model_gpus: int) -> Any:
    """Put a transformers or PEFT model on the first `model_gpus` GPUs and return it.

    Raises:
        VerificationError: there are fewer GPUs, or they do not hold the model.
    """
    from accelerate import dispatch_model

    if model_gpus > torch.cuda.device_count():
        raise VerificationError(
            f"--model-gpus {model_gpus}, and there are {torch.cuda.device_count()} here",
            next_step="name as many as one machine has",
        )
    free = {index: int(_SHARE * torch.cuda.mem_get_info(index)[0]) for index in range(model_gpus)}
    return dispatch_model(network, device_map=device_map(network, free))


def device_map(network: Any, free: Mapping[int, int]) -> dict[str, int]:
    """Choose a GPU for each module, so that a layer stays whole and all GPUs get about the same.

    Args:
        network: a transformers or PEFT model.
        free: bytes that each GPU may be given, by its number.

    Returns:
        The number of a GPU, by module name, as accelerate's `dispatch_model` takes it
        (https://huggingface.co/docs/accelerate/concept_guides/big_model_inference).

    Raises:
        VerificationError: the GPUs do not hold the model.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(getattr(network, "_no_split_modules", None) or ())
    network.tie_weights()
    balanced = get_balanced_memory(network, dict(free), no_split_module_classes=whole)
    found = infer_auto_device_map(network, balanced, no_split_module_classes=whole)
    outside = [name for name, device in found.items() if device not in free]
    if outside:
        raise VerificationError(
            f"{counted(len(free), 'GPU')} with {sum(free.values()) / 1e9:.0f} GB free do not hold the model: "
            f"{counted(len(outside), 'module')} would be left over, the first {outside[0]}",
            next_step="a larger --model-gpus",
        )
    return dict(found)
