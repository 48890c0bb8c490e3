"""The dtypes of safetensors in torch.

It refuses dtypes that the installed torch does not have.
"""

import torch

from publisher.border.safetensors_header import DTYPES, LORA_DTYPES
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import FetchError

_NAMES = {getattr(torch, dtype.torch): name for name, dtype in DTYPES.items() if hasattr(torch, dtype.torch)}
ADAPTER_DTYPES = {DTYPES[name].torch: getattr(torch, DTYPES[name].torch) for name in sorted(LORA_DTYPES)}
"""The dtypes of `adapter.dtype` in the manifest, by the names that they have there."""


def torch_dtype(header: TensorHeader) -> torch.dtype:
    """Return the dtype of a tensor in memory.

    Raises:
        FetchError: torch has none for it.
    """
    known = DTYPES.get(header.dtype)
    found = getattr(torch, known.torch, None) if known else None
    if not isinstance(found, torch.dtype):
        raise FetchError(
            f"{header.file} holds tensors of dtype {header.dtype}, which torch {torch.__version__} cannot read",
            expected=f"one of {', '.join(DTYPES)}",
            next_step="name a checkpoint in another format, or update torch",
        )
    return found


def safetensors_dtype(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype of torch, as `BF16`."""
    return _NAMES[dtype]
