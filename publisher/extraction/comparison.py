"""What differs between two checkpoints, and what of it an adapter holds, and how.

Headers first, then every tensor's bytes, then the model class. It refuses pairs whose tensors
do not match, a base equal to the fine-tune, and changes that a LoRA cannot carry, unless the manifest leaves those
tensors out or carries them whole; each with one report that names them all.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair
from publisher.engines import Engine
from publisher.errors import ExtractionError
from publisher.extraction.adaptable import Obstacle, obstacle_of
from publisher.extraction.delta_norms import shares_of, squared_norms
from publisher.extraction.forms import Forms, choice_of, forms_of
from publisher.extraction.low_rank import low_rank
from publisher.extraction.model_structure import Structure
from publisher.extraction.preflight import layers_of, preflight
from publisher.extraction.quantised_base import quantised_base
from publisher.extraction.tensor_bytes import different_tensors
from publisher.extraction.tensor_names import module_of
from publisher.extraction.tied_copies import copied_on_both_sides, without_tied_copies
from publisher.manifest.schema import AdapterSettings
from publisher.records.checkpoint import QuantisedBase
from publisher.records.extraction import DifferentTensor, SavedModule, TokenRows
from publisher.records.progress import Progress


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the two headers, every tensor's bytes and the model class say.

    Attributes:
        changed: names of the weights that differ and get factors, sorted: of linears, tables and convolutions.
        equal: how many tensors are equal.
        base_only: names in the base alone.
        left_out: tensors that differ and that the manifest leaves out.
        saved: modules that the manifest carries whole.
        transposed: those of `changed` and `experts` that are stored as (in, out), as tables are.
        tables: those of `changed` that are tables.
        kernels: those of `changed` that are convolutions', with the extents of their kernels.
        fp8: the sides (`source`, `base`) that are stored in FP8 with block scales.
        mxfp4: the sides whose changed experts are stored in MXFP4.
        layers: the layers of the changed modules.
        layers_total: how many layers the model has.
        experts: names of the parameters of experts that differ, sorted; none of them is in `changed`.
        labels: of the head that is stored whole, where the base's config.json says otherwise.
        token_rows: tables of which some rows differ, which are stored.
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
    tables: frozenset[str] = frozenset()
    kernels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    fp8: tuple[str, ...] = ()
    mxfp4: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    labels: int | None = None
    token_rows: tuple[TokenRows, ...] = ()

    @property
    def linears(self) -> tuple[str, ...]:
        """The weights of linear modules that get factors."""
        return tuple(name for name in self.changed if name not in self.tables and name not in self.kernels)

    @property
    def adapted(self) -> tuple[str, ...]:
        """All tensors that the adapter has factors for."""
        return (*self.changed, *self.experts)

    quantised: QuantisedBase | None = None


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
    choice = choice_of(settings, both, structure=structure)
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
    finding = partial(
        low_rank,
        both=both,
        model_class=structure.model_class,
        settings=settings,
        engine=engine,
        progress=progress,
    )
    found = forms_of(different, both, choice, structure=structure, low_rank=finding)
    experts = tuple(name for name in found.changed if name in structure.wrappable)
    changed = tuple(name for name in found.changed if name not in structure.wrappable)
    obstacle = obstacle_of(
        [name for name in changed if name not in found.factored], found.saved, tuned, structure=structure
    )
    if obstacle is not None:
        shares = shares_of(squared_norms(both, _all_named(found, obstacle), engine=engine, progress=progress))
        raise obstacle.error(tuned, shares)
    weighed = [*found.ignored, *(name for name in found.saved if name in shared)]
    squares = squared_norms(both, weighed, engine=engine, progress=progress)
    tables = frozenset(name for name in found.factored if module_of(name) in structure.tables)
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
        token_rows=tuple(
            _token_rows(name, rows, both, tied=structure.tied.get(name.removesuffix(".weight"), ()))
            for name, rows in found.rows.items()
        ),
        transposed=_transposed(found.changed, structure),
        tables=tables,
        kernels={name: structure.convolutions[module_of(name)] for name in found.factored - tables},
        fp8=tuple(side for side, headers in sides if _in_fp8(found.changed, headers)),
        mxfp4=tuple(side for side, headers in sides if any(headers[name].mxfp4 for name in experts)),
        experts=experts,
        labels=structure.labels if choice.heads & found.whole.keys() else None,
        quantised=quantised,
    )


def _all_named(found: Forms, obstacle: Obstacle) -> list[str]:
    """Return all tensors that differ, and those of the obstacle that do not: of a module stored whole."""
    return list(dict.fromkeys([*found.every, *obstacle.names]))


def _transposed(changed: Iterable[str], structure: Structure) -> frozenset[str]:
    stacks = {name for name, transposed in structure.wrappable.items() if transposed}
    modules = structure.transposed | structure.tables
    return frozenset(name for name in changed if name.removesuffix(".weight") in modules or name in stacks)


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


def _token_rows(name: str, rows: tuple[int, ...], both: CheckpointPair, *, tied: tuple[str, ...]) -> TokenRows:
    base, tuned = (reader.read(name)[list(rows)].float() for reader in both.readers)
    return TokenRows(
        module=name.removesuffix(".weight"),
        rows=rows,
        tied=tied,
        parameters=tuned.numel(),
        norm=float(torch.linalg.vector_norm((tuned - base).double())),
    )
