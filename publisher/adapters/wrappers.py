"""PEFT's wrappers of single parameters (`target_parameters`): what they wrap, and under which names they are saved."""

import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from peft.tuners.lora.layer import ParamWrapper

from publisher.records.extraction import KEY_PREFIX, ExpertTensor

_IDLE_KEYS = re.compile(
    r"The following \w+ keys did not match any targeted module and were ignored: (\[.*\])\.", re.DOTALL
)


_A = ".lora_A.weight"
_STACK = 3  # dimensions


def wrapper_keys(loaded: Any) -> dict[str, tuple[str, str]]:
    """Return the keys of A and B in an adapter's file, by the full name of each parameter that PEFT has wrapped."""
    return {
        f"{place.removeprefix(KEY_PREFIX).replace('.base_layer', '')}.{layer.parameter_name}": (
            f"{place}{_A}",
            f"{place}.lora_B.weight",
        )
        for place, layer in loaded.named_modules()
        if isinstance(layer, ParamWrapper)
    }


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Where PEFT looks for the factors of one parameter, and how it reads them.

    Attributes:
        keys: of A and B in an adapter's file.
        experts: how many matrices the parameter has.
        rows: of B, the outputs of each matrix.
        columns: of A, its inputs.
        transposed: each matrix is stored as (in, out).
    """

    keys: tuple[str, str]
    experts: int
    rows: int
    columns: int
    transposed: bool


def expert_places(loaded: Any) -> dict[str, ExpertPlace]:
    """Return the places of all parameters that PEFT has wrapped in a model, by full name."""
    every = wrapper_keys(loaded)
    layers = {name: _wrapper(loaded, keys) for name, keys in every.items()}
    return {
        name: ExpertPlace(
            keys=every[name],
            experts=layer.num_experts,
            rows=layer.out_features,
            columns=layer.in_features,
            transposed=layer.get_param().dim() == _STACK and getattr(layer.get_base_layer(), "is_transposed", False),
        )
        for name, layer in layers.items()
    }


def _wrapper(loaded: Any, keys: tuple[str, str]) -> Any:
    """Return the wrapper whose factors are saved by these keys."""
    return loaded.get_submodule(keys[0].removesuffix(_A))


def wrapper_problems(loaded: Any, experts: Sequence[ExpertTensor]) -> Iterator[str]:
    """Yield where PEFT's wrappers are not those of the evidence: another one's factors may have the same shape."""
    keys = wrapper_keys(loaded)
    recorded = {tensor.name: tensor.keys for tensor in experts}
    yield from (f"{name} is wrapped and not in the evidence" for name in sorted(keys.keys() - recorded.keys()))
    for tensor in experts:
        if tensor.name not in keys:
            yield f"{tensor.name} is a parameter that PEFT does not wrap"
        elif keys[tensor.name] != tensor.keys:
            yield f"PEFT saves {tensor.name} as {keys[tensor.name][0]}, and the evidence has {tensor.keys[0]}"
        else:
            yield from _layout_problems(_wrapper(loaded, tensor.keys), tensor)


def _layout_problems(layer: Any, tensor: ExpertTensor) -> Iterator[str]:
    """Yield where PEFT reads the factors as those of other matrices."""
    there = (layer.num_experts, layer.out_features, layer.in_features)
    if there != (tensor.number, *tensor.sides):
        yield f"{tensor.name} is {there} as (experts, out, in) to PEFT, and {(tensor.number, *tensor.sides)} here"


def applies_to_parameters(entry: warnings.WarningMessage, wrapped: Collection[str]) -> bool:
    """Return whether PEFT calls keys of a pattern idle that it did apply, to parameters: it looks at modules alone."""
    told = _IDLE_KEYS.fullmatch(str(entry.message))
    if told is None:
        return False
    keys = re.findall(r"'([^']*)'", told[1])
    return all(any(f".{name}".endswith(f".{key}") for name in wrapped) for key in keys)
