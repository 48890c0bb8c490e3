"""What differs between two checkpoints, and what of it an adapter holds, and how.

Headers first, then every tensor's bytes, then the model class. It refuses pairs whose tensors
do not match, a base equal to the fine-tune, and changes that a LoRA cannot carry, unless the manifest leaves those
tensors out or carries them whole; each with one report that names them all.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair
from publisher.engines import Engine
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.adaptable import Obstacle, is_adaptable, obstacle_of
from publisher.extraction.delta_norms import shares_of, squared_norms
from publisher.extraction.model_structure import Structure
from publisher.extraction.modules_to_save import is_storable, modules_to_save
from publisher.extraction.preflight import layers_of, preflight, selected
from publisher.extraction.quantised_base import quantised_base
from publisher.extraction.tensor_bytes import different_tensors
from publisher.extraction.tied_copies import copied_on_both_sides, without_tied_copies
from publisher.manifest.fields import AUTO
from publisher.manifest.schema import AdapterSettings
from publisher.manifest.task_types import heads_of
from publisher.records.checkpoint import QuantisedBase
from publisher.records.extraction import DifferentTensor, SavedModule
from publisher.records.progress import Progress


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the two headers, every tensor's bytes and the model class say.

    Attributes:
        changed: names of the linear weights that differ, sorted.
        equal: how many tensors are equal.
        base_only: names in the base alone.
        left_out: tensors that differ and that the manifest leaves out.
        saved: modules that the manifest carries whole.
        transposed: those of `changed` and `experts` that are stored as (in, out).
        fp8: the sides (`source`, `base`) that are stored in FP8 with block scales.
        mxfp4: the sides whose changed experts are stored in MXFP4.
        layers: the layers of the changed modules.
        layers_total: how many layers the model has.
        experts: names of the parameters of experts that differ, sorted; none of them is in `changed`.
        labels: of the head that is stored whole, where the base's config.json says otherwise.
        quantised: the quantisation of the base that the fine-tune was merged into; of those tensors, equal are those
            that are the dequantised base.
    """

    changed: tuple[str, ...]
    equal: int
    base_only: tuple[str, ...]
    left_out: tuple[DifferentTensor, ...]
    layers: tuple[int, ...]
    layers_total: int
    saved: tuple[SavedModule, ...] = ()
    transposed: frozenset[str] = frozenset()
    fp8: tuple[str, ...] = ()
    mxfp4: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    labels: int | None = None

    @property
    def adapted(self) -> tuple[str, ...]:
        """All tensors that the adapter has factors for."""
        return (*self.changed, *self.experts)

    quantised: QuantisedBase | None = None


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Names of the tensors that differ, by what becomes of them.

    Attributes:
        every: all that differ.
        ignored: those that the manifest leaves out.
        whole: modules that are stored whole, with all their tensors.
        changed: the rest, which are for a LoRA.
    """

    every: tuple[str, ...]
    ignored: tuple[str, ...]
    whole: Mapping[str, tuple[str, ...]]
    changed: tuple[str, ...]

    @property
    def saved(self) -> tuple[str, ...]:
        """The tensors of all modules that are stored whole."""
        return tuple(name for tensors in self.whole.values() for name in tensors)


def compare(
    both: CheckpointPair, settings: AdapterSettings, *, structure: Structure, engine: Engine, progress: Progress
) -> Comparison:
    """Compare two checkpoints: by headers, by bytes and by the model class.

    Args:
        both: base and tuned, open for reading by the class's names.
        settings: the manifest's `adapter`, of which `ignore` and `carry` are used.
        structure: of the model class.
        engine: what reads and compares.
        progress: called for each tensor.

    Returns:
        What differs, with at least one changed weight.

    Raises:
        ExtractionError: naming all tensors that do not match, or all that changed and cannot be carried.
    """
    both = without_tied_copies(both, structure.names.tied)
    base, tuned = both.headers
    choice = _choice_of(settings, both, structure=structure)
    optional = {name for name in base.keys() ^ tuned.keys() if structure.names.passes_over(name)}
    optional |= choice.stored_anyway
    mismatched = preflight(base=base, tuned=tuned, ignored=choice.ignored, optional=optional, names=structure.names)
    shared = [name for name in tuned if name in base and tuned[name].shape == base[name].shape]
    different = different_tensors(both, shared, engine=engine, progress=progress)
    copies = copied_on_both_sides(both, different, tied=structure.names.tied)
    shared = [name for name in shared if name not in copies]
    different = tuple(name for name in different if name not in copies)
    quantised = quantised_base(both, [name for name in different if structure.is_linear_weight(name)])
    if quantised is not None:
        both = both.on_quantised(quantised)
        adapted = different_tensors(both, quantised.tensors, engine=engine, progress=progress)
        different = tuple(name for name in different if name in adapted or name not in quantised.tensors)
    found = _sorted(different, both, choice, structure=structure)
    experts = tuple(name for name in found.changed if name in structure.wrappable)
    changed = tuple(name for name in found.changed if name not in structure.wrappable)
    obstacle = obstacle_of(changed, found.saved, tuned, structure=structure)
    if obstacle is not None:
        shares = shares_of(squared_norms(both, _all_named(found, obstacle), engine=engine, progress=progress))
        raise obstacle.error(tuned, shares)
    weighed = [*found.ignored, *(name for name in found.saved if name in shared)]
    squares = squared_norms(both, weighed, engine=engine, progress=progress)
    layers, layers_total = layers_of(found.changed, tuned)
    sides = (("source", tuned), ("base", base))
    return Comparison(
        changed=changed,
        equal=len(shared) - len(different),
        base_only=tuple(sorted(base.keys() - tuned.keys())),
        left_out=(*mismatched, *(_left_out(name, squares[name]) for name in found.ignored)),
        layers=layers,
        layers_total=layers_total,
        saved=tuple(
            _saved(module, tensors, both, squares=squares, tied=structure.tied.get(module, ()))
            for module, tensors in found.whole.items()
        ),
        transposed=_transposed(found.changed, structure),
        fp8=tuple(side for side, headers in sides if _in_fp8(found.changed, headers)),
        mxfp4=tuple(side for side, headers in sides if any(headers[name].mxfp4 for name in experts)),
        experts=experts,
        labels=structure.labels if choice.heads & found.whole.keys() else None,
        quantised=quantised,
    )


def _by_name(*sides: Mapping[str, TensorHeader]) -> dict[str, list[TensorHeader]]:
    return {name: [side[name] for side in sides if name in side] for name in {key for side in sides for key in side}}


@dataclass(frozen=True, slots=True)
class _Choice:
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


def _choice_of(settings: AdapterSettings, both: CheckpointPair, *, structure: Structure) -> _Choice:
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
    return _Choice(ignored, carried, heads, frozenset(stored))


def _sorted(different: tuple[str, ...], both: CheckpointPair, choice: _Choice, *, structure: Structure) -> _Sorted:
    tuned = both.headers.tuned
    kept = [name for name in different if name not in choice.ignored]
    if choice.carried is None:
        chosen = [
            name for name in kept if not is_adaptable(name, tuned[name], structure) and is_storable(name, structure)
        ]
    else:
        chosen = [name for name in kept if name in choice.carried]
    chosen += [name for name in choice.stored_anyway if name in tuned]
    whole = modules_to_save(chosen, choice.heads, tuned, structure=structure)
    saved = {name for tensors in whole.values() for name in tensors}
    _require_none_ignored(saved & choice.ignored - _equal_tensors(both, different))
    changed = tuple(name for name in kept if name not in saved)
    _require_change(changed, different, whole)
    return _Sorted(different, tuple(name for name in different if name in choice.ignored), whole, changed)


def _equal_tensors(both: CheckpointPair, different: Collection[str]) -> set[str]:
    base, tuned = both.headers
    return {name for name in base.keys() & tuned.keys() if base[name].shape == tuned[name].shape} - set(different)


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


def _all_named(found: _Sorted, obstacle: Obstacle) -> list[str]:
    """Return all tensors that differ, and those of the obstacle that do not: of a module stored whole."""
    return list(dict.fromkeys([*found.every, *obstacle.names]))


def _transposed(changed: Iterable[str], structure: Structure) -> frozenset[str]:
    stacks = {name for name, transposed in structure.wrappable.items() if transposed}
    return frozenset(name for name in changed if name.removesuffix(".weight") in structure.transposed or name in stacks)


def _in_fp8(names: Iterable[str], headers: Mapping[str, TensorHeader]) -> bool:
    return any(headers[name].in_fp8 for name in names)


def _left_out(name: str, square: float) -> DifferentTensor:
    if not math.isfinite(square):
        return DifferentTensor(name=name, reason="differs, and holds NaN or infinity")
    return DifferentTensor(name=name, reason="differs", norm=math.sqrt(square))


def _saved(
    module: str,
    tensors: tuple[str, ...],
    both: CheckpointPair,
    *,
    squares: Mapping[str, float],
    tied: tuple[str, ...],
) -> SavedModule:
    """Return the record of a module; without a norm where the base has not all of its tensors, in these shapes."""
    for name in tensors:
        known = squares.get(name, math.inf)
        if not math.isfinite(known) and not bool(torch.isfinite(both.readers.tuned.read(name)).all()):
            raise ExtractionError(
                f"{name} holds NaN or infinity in the source",
                expected="finite weights",
                next_step="check that checkpoint; it is damaged or its training diverged",
            )
    elements = sum(math.prod(both.headers.tuned[name].shape) for name in tensors)
    return SavedModule(
        module=module,
        tensors=tensors,
        tied=tied,
        parameters=elements * (1 + len(tied)),
        norm=math.sqrt(sum(squares[name] for name in tensors)) if squares.keys() >= set(tensors) else None,
    )
