"""Which form each changed tensor has in the adapter: factors of a LoRA, rows of a table, or whole modules.

The manifest says by `adapter.ignore` what is left out and by `adapter.carry` what is stored whole; under `auto`, the
smallest form is chosen that is right for what no LoRA can hold. This refuses a choice that contradicts itself, or that
leaves nothing for a LoRA.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.adaptable import is_adaptable
from publisher.extraction.matrices import as_matrix
from publisher.extraction.model_structure import Structure
from publisher.extraction.modules_to_save import is_storable, modules_to_save
from publisher.extraction.preflight import selected
from publisher.extraction.tensor_bytes import changed_rows
from publisher.extraction.tensor_names import module_of
from publisher.manifest.fields import AUTO
from publisher.manifest.schema import AdapterSettings
from publisher.manifest.task_types import heads_of

LowRank = Callable[[Mapping[str, int]], frozenset[str]]  # of weights, with the elements that each takes otherwise

_FEW = 0.5  # of a table's rows, beyond which it is stored whole


@dataclass(frozen=True, slots=True)
class Forms:
    """Names of the tensors that differ, by what becomes of them.

    Attributes:
        every: all that differ.
        ignored: those that the manifest leaves out.
        whole: modules that are stored whole, with all their tensors.
        rows: tables of which some rows are stored, by the names of their tensors.
        changed: the rest, which are for a LoRA.
        factored: those of `changed` that are no linear weights: of tables and convolutions.
    """

    every: tuple[str, ...]
    ignored: tuple[str, ...]
    whole: Mapping[str, tuple[str, ...]]
    rows: Mapping[str, tuple[int, ...]]
    changed: tuple[str, ...]
    factored: frozenset[str]

    @property
    def saved(self) -> tuple[str, ...]:
        """The tensors of all modules that are stored whole."""
        return tuple(name for tensors in self.whole.values() for name in tensors)


def _by_name(*sides: Mapping[str, TensorHeader]) -> dict[str, list[TensorHeader]]:
    return {name: [side[name] for side in sides if name in side] for name in {key for side in sides for key in side}}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the manifest and the task type say of tensors that a LoRA cannot hold.

    Attributes:
        ignored: tensors that are left out.
        carried: tensors whose modules are stored whole where they differ; None where this tool chooses.
        heads: modules that are stored whole in any case.
        stored_anyway: tensors of these modules, and those that the base lacks or has otherwise: they need none there.
    """

    ignored: frozenset[str]
    carried: frozenset[str] | None
    heads: frozenset[str]
    stored_anyway: frozenset[str]


def choice_of(settings: AdapterSettings, both: CheckpointPair, *, structure: Structure) -> Choice:
    """Return what the manifest and the task type say of tensors that a LoRA cannot hold.

    Args:
        settings: the manifest's `adapter`.
        both: base and tuned, of which the headers are asked.
        structure: of the model class.

    Returns:
        The names of the tensors and modules.

    Raises:
        ExtractionError: a pattern of the manifest selects nothing.
    """
    base, tuned = both.headers
    ignored = selected("ignore", settings.ignore, _by_name(base, tuned), of="in either checkpoint")
    carried = None
    if settings.carry != AUTO:
        carried = selected("carry", settings.carry, _by_name(tuned), of="of the source")
    heads = heads_of(settings.task_type, structure.every)
    alone = {name for name in tuned if name not in base or base[name].shape != tuned[name].shape}
    alone = {name for name in alone - ignored if name in structure.names.parameters and is_storable(name, structure)}
    of_heads = {name for name in {*tuned, *base} if any(name.startswith(f"{head}.") for head in heads)}
    stored = of_heads | (alone if carried is None else alone & carried)
    return Choice(ignored, carried, heads, frozenset(stored))


def forms_of(
    different: Sequence[str], both: CheckpointPair, choice: Choice, *, structure: Structure, low_rank: LowRank
) -> Forms:
    """Return the form of each tensor that differs.

    Args:
        different: names of all tensors that both have and that differ.
        both: base and tuned, open for reading by the class's names.
        choice: what the manifest and the task type say.
        structure: of the model class.
        low_rank: finds those weights of which factors hold the change, and are smaller than what is stored otherwise.

    Returns:
        The names by what becomes of them, with at least one for a LoRA.

    Raises:
        ExtractionError: nothing is left for a LoRA, or modules that are to be stored cannot be.
    """
    tuned = both.headers.tuned
    kept = [name for name in different if name not in choice.ignored]
    rows = _few_rows(kept, both, structure) if choice.carried is None else {}
    chosen = [name for name in kept if name not in rows and _is_stored(name, tuned[name], choice, structure=structure)]
    factored = frozenset[str]()
    if choice.carried is None:
        factored = low_rank(_smaller_with_factors([*rows, *chosen], rows, tuned, structure=structure))
    rows = {name: found for name, found in rows.items() if name not in factored}
    chosen = [name for name in chosen if name not in factored]
    chosen += [name for name in choice.stored_anyway if name in tuned]
    whole = modules_to_save(chosen, choice.heads, tuned, structure=structure)
    saved = {name for tensors in whole.values() for name in tensors}
    _require_none_ignored(saved & choice.ignored - _equal_tensors(both, different))
    _require_tied({*whole, *map(module_of, rows)}, kept, both, structure=structure)
    changed = tuple(name for name in kept if name not in saved and name not in rows)
    _require_change(changed, different, whole)
    ignored = tuple(name for name in different if name in choice.ignored)
    return Forms(tuple(different), ignored, whole, rows, changed, factored & {*changed})


def _is_stored(name: str, header: TensorHeader, choice: Choice, *, structure: Structure) -> bool:
    """Return whether the module of a tensor that differs is stored whole."""
    if choice.carried is not None:
        return name in choice.carried
    return not is_adaptable(name, header, structure) and is_storable(name, structure)


def _few_rows(names: Sequence[str], both: CheckpointPair, structure: Structure) -> dict[str, tuple[int, ...]]:
    """Return the tables among these tensors of which few rows differ, with these rows."""
    tables = [name for name in names if name.endswith(".weight") and module_of(name) in structure.tables]
    found = {name: changed_rows(name, both.readers, both.headers.tuned[name].shape) for name in tables}
    return {name: rows for name, rows in found.items() if len(rows) <= _FEW * both.headers.tuned[name].shape[0]}


def _smaller_with_factors(
    names: Sequence[str], rows: Mapping[str, Sequence[int]], tuned: Mapping[str, TensorHeader], *, structure: Structure
) -> dict[str, int]:
    """Return the weights that PEFT adapts beside linear ones, and that factors of rank 1 would hold in fewer elements.

    With each stand the elements that it takes otherwise. A table that shares its weight has none here: PEFT's
    merge_and_unload adds the update of a shared weight twice.
    """
    adapted = structure.convolutions.keys() | {name for name in structure.embeddings if not structure.tied.get(name)}
    found = dict[str, int]()
    for name in names:
        shape = tuned[name].shape
        if name.endswith(".weight") and module_of(name) in adapted and tuned[name].dtype in LORA_DTYPES:
            otherwise = len(rows[name]) * shape[1] if name in rows else math.prod(shape)
            found |= {name: otherwise} if sum(as_matrix(shape)) < otherwise else {}
    return found


def _equal_tensors(both: CheckpointPair, different: Collection[str]) -> set[str]:
    base, tuned = both.headers
    return {name for name in base.keys() & tuned.keys() if base[name].shape == tuned[name].shape} - set(different)


def _require_tied(
    modules: Collection[str], kept: Collection[str], both: CheckpointPair, *, structure: Structure
) -> None:
    """Require that modules which share a weight in the class do so in the source: PEFT gives them the same tensors.

    Raises:
        ExtractionError: the source has another weight in one of them.
    """
    base, tuned = both.headers
    own = {*kept, *(tuned.keys() - base.keys())}
    apart = [
        f"{module}.weight and {other}.weight"
        for module in sorted(modules)
        for other in structure.tied.get(module, ())
        if f"{other}.weight" in own or (f"{module}.weight" not in base and f"{other}.weight" in tuned)
    ]
    if apart:
        raise ExtractionError(
            f"the base's class shares one weight where the source has two:\n{listed(apart)}\n",
            expected="weights that are shared in both, since PEFT keeps them so",
            next_step="name a base whose config.json has tie_word_embeddings: false, or leave the head out under "
            "adapter.ignore",
        )


def _require_none_ignored(names: Collection[str]) -> None:
    if names:
        raise ExtractionError(
            f"adapter.ignore leaves out tensors of modules that are stored whole:\n{listed(sorted(names))}\n",
            expected="modules that are stored with all their tensors, since PEFT replaces a module as a whole",
            next_step="name all tensors of these modules under adapter.ignore, or none",
        )


def _require_change(changed: Sequence[str], different: Sequence[str], whole: Collection[str]) -> None:
    if changed:
        return
    next_step = "correct adapter.ignore in the manifest"
    if whole and different:
        found = f"all that differs is stored whole, in {counted(len(whole), 'module')}"
        next_step = "publish these modules as they are, or correct adapter.carry in the manifest"
    elif different:
        found = f"adapter.ignore leaves out everything that differs ({counted(len(different), 'tensor')})"
    else:
        found = "base and source are equal in every tensor"
        next_step = "correct source or base in the manifest"
    raise ExtractionError(
        f"{found}, so there is nothing to publish",
        expected="a source whose linear weights differ from the base's",
        next_step=next_step,
    )
