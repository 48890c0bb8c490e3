"""What a model class knows of its modules: which are linear, stored transposed, refused by PEFT, or share a weight.

The class is built on the meta device from config.json, so that no weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from publisher.extraction.expert_parameters import wrappable_parameters
from publisher.extraction.tensor_names import module_of

if TYPE_CHECKING:
    from publisher.adapters.class_names import ClassNames


@dataclass(frozen=True, slots=True)
class Structure:
    """Modules of a class by name.

    Attributes:
        model_class: the class.
        labels: of the head, where the base's config.json says otherwise.
        every: all of them.
        linear: weights are (out, in).
        transposed: weights are (in, out), as in transformers' Conv1D.
        refused: linear modules that PEFT takes no LoRA for.
        tied: for a module that shares its weight, the others that do.
        shapes: (out, in) of each linear module's weight, however it is stored.
        tables: embeddings, (tokens, width).
        embeddings: those of `tables` that PEFT's LoRA computes rightly.
        convolutions: those that PEFT's LoRA computes and merges rightly, with the extents of their kernels.
        kinds: of each module the name of its class, as `Linear` or `MixtralExperts`.
        names: what the class calls the tensors of a checkpoint.
        wrappable: parameters that are linear weights and no module's, such as stacked experts; for each, whether its
            matrices are stored as (in, out).
    """

    model_class: str
    labels: int | None
    every: frozenset[str]
    linear: frozenset[str]
    transposed: frozenset[str]
    refused: frozenset[str]
    tied: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, int]]
    tables: frozenset[str]
    embeddings: frozenset[str]
    convolutions: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    names: "ClassNames"
    wrappable: Mapping[str, bool]

    def is_linear_weight(self, name: str) -> bool:
        """Return whether a tensor is the weight of a linear module."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self.linear


def structure_of(model_class: str, folder: Path, *, head_of: Path | None = None) -> Structure:
    """Return the structure of the class, built without weights from config.json in this folder.

    Args:
        model_class: a class of transformers.
        folder: that has the base's config.json.
        head_of: that has the config.json which says how many labels the head has, where that is not the base's.

    Returns:
        The structure.

    Raises:
        ValidationError: transformers has no such class, or it is not for this configuration.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    from publisher.adapters.class_names import ClassNames
    from publisher.adapters.loading import configuration, empty_model, quiet

    with quiet():
        config = configuration(folder)
        labels = configuration(head_of).num_labels if head_of else config.num_labels
        labels = None if labels == config.num_labels else labels
        model = empty_model(model_class, configuration(folder, labels=labels))
        modules = dict(model.named_modules())
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter):
            sharing.setdefault(id(weight), []).append(name)
    linear = frozenset(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))
    transposed = frozenset(name for name, module in modules.items() if isinstance(module, Conv1D))
    return Structure(
        model_class=model_class,
        labels=labels,
        every=frozenset(modules),
        linear=linear,
        refused=frozenset(name for name in linear if _is_refused(model, name)),
        transposed=transposed,
        tied={name: tuple(other for other in group if other != name) for group in sharing.values() for name in group},
        shapes={name: tuple(modules[name].weight.shape) for name in linear}
        | {name: tuple(reversed(modules[name].weight.shape)) for name in transposed},
        tables=frozenset(name for name, module in modules.items() if isinstance(module, torch.nn.Embedding)),
        embeddings=frozenset(name for name, module in modules.items() if _is_plain_embedding(module)),
        convolutions={name: module.kernel_size for name, module in modules.items() if _is_plain_convolution(module)},
        kinds={name: type(module).__name__ for name, module in modules.items()},
        names=ClassNames.of(model),
        wrappable={
            name: transposed
            for name, transposed in wrappable_parameters(model).items()
            if not _is_refused(model, module_of(name))
        },
    )


def _is_plain_embedding(module: Any) -> bool:
    """Return whether PEFT's wrapper looks up what the table itself does: it passes over a forward of its own.

    A scale of what is looked up is known to it by the name that transformers gives it, `embed_scale`.
    """
    from torch.nn import Embedding

    return isinstance(module, Embedding) and (
        type(module).forward is Embedding.forward or hasattr(module, "embed_scale")
    )


def _is_plain_convolution(module: Any) -> bool:
    """Return whether PEFT's two convolutions give what a changed one gives: they have no dilation, nor padding mode.

    It merges none that has groups.
    """
    from torch.nn import Conv1d, Conv2d, Conv3d

    plain = type(module) in {Conv1d, Conv2d, Conv3d} and module.groups == 1 and module.padding_mode == "zeros"
    return plain and set(module.dilation) == {1}


def _is_refused(model: Any, name: str) -> bool:
    """Return PEFT's own judgement, which it gives when it puts an adapter in."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    try:
        LoraModel._check_target_module_compatiblity(model, LoraConfig(), model, name.rpartition(".")[2])  # noqa: SLF001 - asked nowhere else before the adapter is there
    except ValueError:
        return True
    return False
