"""Which parameters of a class hold linear weights that PEFT takes by the parameter's name, and not by a module's.

Experts lie in one tensor, a matrix for each; a router may be a bare matrix. The weight of a linear module is one of
these where PEFT would adapt something else by the module's name, or where the module does more than a linear map: a
LoRA beside it would not be the update of its weight. A table, a convolution, a norm is none.
"""

from collections.abc import Iterable
from typing import Any

_STACK, _MATRIX = 3, 2  # dimensions


def wrappable_parameters(model: Any) -> dict[str, bool]:
    """Return the parameters of a model that PEFT can wrap as linear weights, and which of them are stored transposed.

    Args:
        model: of transformers, on the meta device or not.

    Returns:
        For each full name, whether each matrix is stored as (in, out).
    """
    from torch import nn

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    redirected = _redirected(model, linear)
    unlike = {name for name, module in linear.items() if type(module).forward is not nn.Linear.forward}
    return {
        f"{name}.{leaf}": bool(getattr(module, "is_transposed", False)) and parameter.dim() == _STACK
        for name, module in model.named_modules()
        if name and (name in redirected | unlike or not _is_adapted_as_module(module))
        for leaf, parameter in module.named_parameters(recurse=False)
        if _is_linear(leaf, tuple(parameter.shape))
    }


def _redirected(model: Any, names: Iterable[str]) -> set[str]:
    """Return the modules whose names PEFT takes for others: for experts that earlier versions had one by one.

    In some classes with experts, it reads `mlp.shared_expert.gate_proj` in `target_modules` as the experts' own
    `gate_up_proj`, which that became (`utils/transformers_weight_conversion.py`); `target_parameters` are left alone.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_kept(leaf: str) -> bool:
        config = LoraConfig(target_modules=[leaf])
        try:
            convert_peft_config_for_transformers(config, model, None)
        except ValueError:  # it asks for the other half of what it fuses
            return False
        return leaf in (config.target_modules or ())

    leaves = {name.rpartition(".")[2] for name in names}
    lost = {leaf for leaf in leaves if not is_kept(leaf)}
    return {name for name in names if name.rpartition(".")[2] in lost}


def _is_adapted_as_module(module: Any) -> bool:
    from torch import nn
    from torch.nn.utils.parametrize import ParametrizationList
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, ParametrizationList)
    return isinstance(module, kinds)


def _is_linear(leaf: str, shape: tuple[int, ...]) -> bool:
    """Return whether this is a stack of matrices, or a matrix by the name that a linear weight has."""
    if len(shape) == _MATRIX:
        return leaf == "weight"
    return len(shape) == _STACK and min(shape) >= _MATRIX
