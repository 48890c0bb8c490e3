"""What stands in the way of a LoRA: changed tensors that are no linear weights, or that PEFT does not take.

The model class says what holds a tensor; names and shapes are asked only where there is none (`publish new`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.model_structure import Structure
from publisher.extraction.preflight import sizes
from publisher.extraction.tensor_names import module_of

_CARRY_OR_IGNORE = (
    "in the manifest, write adapter.carry: auto to store them too, or name them there or under "
    "adapter.ignore, to leave them out knowingly"
)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Changed tensors that no adapter can hold, and what to say of them.

    Attributes:
        names: the tensors, at least one.
        found: what they are, the first line of the message.
        expected: what would have been right.
        next_step: what to do about it.
        kinds: the class of the module that holds each, where that is the reason.
    """

    names: tuple[str, ...]
    found: str
    expected: str
    next_step: str
    kinds: Mapping[str, str] = field(default_factory=dict)

    def error(self, headers: Mapping[str, TensorHeader], shares: Mapping[str, str]) -> ExtractionError:
        """Return the error that names each tensor with its shape, its dtype and its share of the delta.

        Args:
            headers: of the merged fine-tune, by tensor name.
            shares: the share of each tensor, in words.

        Returns:
            The error to raise.
        """
        lines = (
            f"{name} ({sizes(headers[name].shape)}, {headers[name].dtype}), {shares[name]}{self._kind(name)}"
            for name in self.names
        )
        return ExtractionError(f"{self.found}:\n{listed(lines)}\n", expected=self.expected, next_step=self.next_step)

    def _kind(self, name: str) -> str:
        kind = self.kinds.get(name)
        return f", in a {kind}" if kind else ""


def obstacle_of(
    changed: Sequence[str], saved: Collection[str], headers: Mapping[str, TensorHeader], *, structure: Structure
) -> Obstacle | None:
    """Return what stands in the way of an adapter, if anything does, before any arithmetic.

    Args:
        changed: names of the tensors that are for a LoRA.
        saved: the tensors of modules that are stored whole.
        headers: of the merged fine-tune, by the class's names.
        structure: of the model class.

    Returns:
        The tensors that the class has no place for; else those that a LoRA cannot carry; else those of modules that
        PEFT takes no LoRA for.
    """
    lost = [name for name in changed if name not in structure.names.parameters]
    lost += [name for name in saved if module_of(name) not in structure.every]
    if lost:
        return Obstacle(
            tuple(lost),
            found=f"{structure.model_class} has no module for {counted(len(lost), 'changed tensor')} of the checkpoint",
            expected="weights of the class's own modules, since PEFT finds its places by their names",
            next_step="correct model_class in the manifest if another class was saved, or name the tensors under "
            "adapter.ignore to leave them out knowingly",
        )
    stuck = tuple(name for name in changed if not is_adaptable(name, headers[name], structure))
    if stuck:
        return Obstacle(
            stuck,
            found=f"source and base differ in {counted(len(stuck), 'tensor')} that a LoRA cannot carry",
            expected="changes in linear weights alone",
            next_step=_CARRY_OR_IGNORE,
            kinds={name: structure.kinds.get(module_of(name), "") for name in stuck},
        )
    refused = tuple(name for name in changed if module_of(name) in structure.refused)
    if refused:
        return Obstacle(
            refused,
            found=f"PEFT takes no LoRA for {counted(len(refused), 'changed module')} of {structure.model_class}",
            expected="changes in modules that PEFT adapts",
            next_step=_CARRY_OR_IGNORE,
        )
    return None


def is_adaptable(name: str, header: TensorHeader, structure: Structure) -> bool:
    """Return whether a LoRA can hold a change of this tensor: the weight of a linear module, or experts' parameter.

    Args:
        name: of the tensor, by the class.
        header: of it in the merged fine-tune.
        structure: of the model class.

    Returns:
        Whether a LoRA of PEFT can; it may refuse the module all the same.
    """
    if name in structure.wrappable:
        return True
    is_weight = name.endswith(".weight") and header.dtype in LORA_DTYPES
    return is_weight and module_of(name) in structure.linear | structure.transposed
