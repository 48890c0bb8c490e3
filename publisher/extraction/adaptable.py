"""What stands in the way of a LoRA: changed tensors that are no linear weights, or that PEFT does not take.

Names and shapes tell nearly always enough, and then nothing heavy is imported. The model class is asked where they
leave a doubt: a weight whose bias fits its columns (GPT-2's Conv1D), numbered experts, which classes of transformers
may hold fused, Mamba, where PEFT refuses some modules, or a class other than the one that was saved.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints.files import read_config
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.model_structure import Structure, structure_of
from publisher.extraction.modules_to_save import module_of
from publisher.extraction.preflight import is_table, sizes

_EXPERT = re.compile(r"\.experts\.\d+\.")
_CARRY_OR_IGNORE = (
    "in the manifest, name them under adapter.ignore to leave them out knowingly, or under adapter.carry to store "
    "their modules whole"
)


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Changed tensors that no adapter can hold, and what to say of them.

    Attributes:
        names: the tensors, at least one.
        found: what they are, the first line of the message.
        expected: what would have been right.
        next_step: what to do about it.
    """

    names: tuple[str, ...]
    found: str
    expected: str
    next_step: str

    def error(self, headers: Mapping[str, TensorHeader], shares: Mapping[str, str]) -> ExtractionError:
        """Return the error that names each tensor with its shape, its dtype and its share of the delta.

        Args:
            headers: of the merged fine-tune, by tensor name.
            shares: the share of each tensor, in words.

        Returns:
            The error to raise.
        """
        lines = (f"{name} ({sizes(headers[name].shape)}, {headers[name].dtype}), {shares[name]}" for name in self.names)
        return ExtractionError(f"{self.found}:\n{listed(lines)}\n", expected=self.expected, next_step=self.next_step)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the changed tensors are.

    Attributes:
        structure: of the class, where it was asked.
        experts: those that are parameters of experts, which PEFT wraps by name.
        obstacle: what stands in the way, if anything does.
    """

    structure: Structure | None = None
    experts: tuple[str, ...] = ()
    obstacle: Obstacle | None = None


def judge(changed: Sequence[str], saved: Collection[str], both: CheckpointPair, *, model_class: str) -> Judgement:
    """Decide by names and shapes what stands in the way and, where those leave a doubt, by the model class.

    Args:
        changed: names of the tensors that are for a LoRA.
        saved: the tensors of modules that are stored whole.
        both: base and tuned; the base's folder has its config.json.
        model_class: the manifest's.

    Returns:
        What they are, and what stands in the way.

    Raises:
        ValidationError: transformers has no such class, or it is not for this configuration.
    """
    headers, folder = both.headers.tuned, both.snapshots.base.folder
    stacked = {name for name in changed if is_stack(headers[name])}
    obstacle = _obstacle_by_name([name for name in changed if name not in stacked], headers)
    if obstacle is not None:
        return Judgement(obstacle=obstacle)
    in_doubt = saved or stacked or _in_doubt(changed, headers, config=read_config(folder), model_class=model_class)
    if not in_doubt:
        return Judgement()
    structure = structure_of(model_class, folder)
    experts = tuple(name for name in changed if name in structure.wrappable)
    obstacle = _obstacle_by_name([name for name in changed if name in stacked and name not in experts], headers)
    linear = [name for name in changed if name not in experts]
    obstacle = obstacle or _obstacle_in_class(linear, saved, structure=structure, model_class=model_class)
    return Judgement(structure, experts, obstacle)


def _obstacle_by_name(changed: Sequence[str], headers: Mapping[str, TensorHeader]) -> Obstacle | None:
    """Return the changed tensors that are no linear weights by their names and shapes, if there are any."""
    stuck = tuple(name for name in changed if not is_linear_weight(name, headers[name]))
    if not stuck:
        return None
    return Obstacle(
        stuck,
        found=f"source and base differ in {counted(len(stuck), 'tensor')} that a LoRA cannot carry",
        expected="changes in linear weights alone",
        next_step=_CARRY_OR_IGNORE,
    )


def _obstacle_in_class(
    changed: Sequence[str], saved: Collection[str], *, structure: Structure, model_class: str
) -> Obstacle | None:
    """Return the changed tensors that are none of the class's own modules, or that PEFT refuses, if there are any."""
    lost = (*_lost(changed, structure.linear | structure.transposed), *_lost(saved, structure.every))
    if lost:
        return Obstacle(
            lost,
            found=f"{model_class} has no module for {counted(len(lost), 'changed tensor')} of the checkpoint",
            expected="weights of the class's own modules, since PEFT finds its places by their names",
            next_step="correct model_class in the manifest if another class was saved; experts that the class holds "
            "fused in one tensor cannot be carried yet: name them under adapter.ignore to leave them out knowingly",
        )
    refused = tuple(name for name in changed if module_of(name) in structure.refused)
    if refused:
        return Obstacle(
            refused,
            found=f"PEFT takes no LoRA for {counted(len(refused), 'changed module')} of {model_class}",
            expected="changes in modules that PEFT adapts",
            next_step=_CARRY_OR_IGNORE,
        )
    return None


def _lost(names: Collection[str], modules: Collection[str]) -> Iterator[str]:
    return (name for name in names if module_of(name) not in modules)


def is_stack(header: TensorHeader) -> bool:
    """Return whether this may hold a matrix for each expert, by its shape alone."""
    return len(header.shape) == 3 and header.dtype in LORA_DTYPES  # noqa: PLR2004 - experts, rows and columns


def is_linear_weight(name: str, header: TensorHeader) -> bool:
    """Return whether a LoRA can carry a change of this tensor, by its name and shape alone.

    A 2-D `.weight` counts unless its module is named like an embedding table. Validation, which knows the model
    class, is the judge in the end.
    """
    is_matrix = name.endswith(".weight") and len(header.shape) == 2  # noqa: PLR2004 - rows and columns
    return is_matrix and header.dtype in LORA_DTYPES and not is_table(name)


def _in_doubt(
    changed: Sequence[str], headers: Mapping[str, TensorHeader], *, config: Mapping[str, Any], model_class: str
) -> bool:
    """Return whether names and shapes alone may mislead, so that the class has to be asked."""
    architectures = config.get("architectures")
    is_other_class = isinstance(architectures, list) and model_class not in architectures
    has_experts = any(_EXPERT.search(name) for name in changed) or "expert" in str(config).lower()
    has_mamba = "mamba" in str(config).lower()
    return is_other_class or has_experts or has_mamba or any(_looks_transposed(name, headers) for name in headers)


def _looks_transposed(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    weight, bias = headers[name], headers.get(f"{name.removesuffix('.weight')}.bias")
    if bias is None or not name.endswith(".weight") or len(weight.shape) != 2:  # noqa: PLR2004 - rows and columns
        return False
    rows, columns = weight.shape
    return bias.shape == (columns,) and rows != columns
