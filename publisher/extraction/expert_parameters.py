"""Which parameters of a class hold linear weights that are no module of their own, so that PEFT wraps them by name.

Experts lie in one tensor, a matrix for each; a router may be a bare matrix. A module that PEFT adapts as a whole, a
table, a convolution, a norm is none of these.
"""

from typing import Any

_STACK, _MATRIX = 3, 2  # dimensions


def wrappable_parameters(model: Any) -> dict[str, bool]:
    """Return the parameters of a model that PEFT can wrap as linear weights, and which of them are stored transposed.

    Args:
        model: of transformers, on the meta device or not.

    Returns:
        For each full name, whether each matrix is stored as (in, out).
    """
    return {
        f"{name}.{leaf}": bool(getattr(module, "is_transposed", False)) and parameter.dim() == _STACK
        for name, module in model.named_modules()
        if name and not _is_adapted_as_module(module)
        for leaf, parameter in module.named_parameters(recurse=False)
        if _is_linear(leaf, tuple(parameter.shape))
    }


def _is_adapted_as_module(module: Any) -> bool:
    from torch import nn
    from torch.nn.utils.parametrize import ParametrizationList
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, ParametrizationList)
    return isinstance(module, kinds)


def _is_linear(leaf: str, shape: tuple[int, ...]) -> bool:
    """Return whether this is a stack of matrices, or a matrix by the name that a linear weight has."""
    is_thin = any(size < _MATRIX for size in shape)
    return not is_thin and (len(shape) == _STACK or (len(shape) == _MATRIX and leaf == "weight"))
