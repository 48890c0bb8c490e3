"""How the factors of an adapter's stacked experts are packed: by the fine-tune, by themselves, or as the file states.

The merged fine-tune decides where it is at hand. Otherwise the factors do (`numerics.packing`), and where they speak
for no packing clearly, what Unsloth states in adapter_config.json counts. It refuses a fine-tune that lacks one of the
parameters.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch

from publisher.adapters.wrappers import ExpertPlace
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import Sides, open_pair
from publisher.checkpoints.reading import TensorReader
from publisher.errors import FetchError
from publisher.extraction.experts import expert_pairs
from publisher.extraction.model_structure import Structure
from publisher.numerics.packing import (
    PACKINGS,
    PEFT,
    Agreement,
    Packing,
    Told,
    by_expert,
    factor_figures,
    told_by_factors,
    told_by_update,
)
from publisher.numerics.randomness import seeded
from publisher.records.checkpoint import Checkpoint, Snapshot

LAYOUT: Final = "lora_B_layout"  # in adapter_config.json, by Unsloth since September 2026
STATED: Final[Mapping[object, Packing]] = {"rank_major": PEFT, "grouped_by_expert": Packing("expert", "expert")}
_BY_FACTORS, _BY_UPDATE = 32, 8  # parameters that are looked at: a writer packs all of them alike
_MATRIX = 2  # dimensions


def words(packing: Packing) -> str:
    """Return a packing in words."""
    ways = {"expert": "expert by expert", "rank": "with the expert running fastest"}
    return f"the rows of A {ways[packing.a]}, the columns of B {ways[packing.b]}"


def told_packing(
    headers: Mapping[str, TensorHeader],
    places: Mapping[str, ExpertPlace],
    *,
    stated: object,
    names: Structure,
    both: tuple[Path, Path] | None,
) -> Told | None:
    """Return how the factors are packed, as far as it can be told.

    Args:
        headers: of the adapter's tensors, by the keys that PEFT looks for.
        places: where PEFT looks for the factors of each parameter.
        stated: what adapter_config.json has under `lora_B_layout`; None where it has nothing.
        names: the base's class, which names its tensors.
        both: the folders of base and merged fine-tune, where both are at hand.

    Returns:
        The packing and what it follows from; None where no parameter has experts whose order could matter.

    Raises:
        FetchError: a file is missing or damaged, or the fine-tune or the base lacks one of the parameters.
    """
    stacked = {name: place for name, place in sorted(places.items()) if order_matters(headers, place)}
    if not stacked:
        return None
    if both is not None:
        return _by_update(headers, _some(stacked, _BY_UPDATE), names=names, both=both)
    told = _by_factors(headers, _some(stacked, _BY_FACTORS))
    said = STATED.get(stated) if isinstance(stated, str) else None
    if said is None or said == told.packing:
        return told
    if told.packing is None:
        return Told(said, f"as adapter_config.json states ({LAYOUT}: {stated})")
    return Told(None, f"adapter_config.json states {LAYOUT}: {stated}, and the factors speak against it: {told.how}")


def order_matters(headers: Mapping[str, TensorHeader], place: ExpertPlace) -> bool:
    """Return whether a parameter has both factors, for several experts at a rank that is above 1 and none too large."""
    a, b = (headers.get(key) for key in place.keys)
    if a is None or b is None or len(a.shape) != _MATRIX or len(b.shape) != _MATRIX or place.experts < _MATRIX:
        return False
    rank, rest = divmod(a.shape[0], place.experts)
    fits = (a.shape[1], b.shape) == (place.columns, (place.rows, a.shape[0]))
    return fits and not rest and 1 < rank <= min(place.rows, place.columns)


def _some(places: Mapping[str, ExpertPlace], most: int) -> dict[str, ExpertPlace]:
    """Return so many of the parameters at the most, evenly over the layers."""
    names = list(places)[:: -(-len(places) // most)]
    return {name: places[name] for name in names}


def _by_factors(headers: Mapping[str, TensorHeader], places: Mapping[str, ExpertPlace]) -> Told:
    figures = []
    with TensorReader(headers) as reader:
        for name, place in places.items():
            a, b = _vectors(reader, place)
            if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
                return Told(None, f"the factors of {name} hold NaN or infinity")
            generator = seeded(name, torch.device("cpu"))
            figures.append(factor_figures(a, b, experts=place.experts, generator=generator))
    return told_by_factors(figures)


def _vectors(reader: TensorReader, place: ExpertPlace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of A and, as rows, the columns of B."""
    a, b = (reader.read(key) for key in place.keys)
    return a, b.T


def _by_update(
    headers: Mapping[str, TensorHeader],
    places: Mapping[str, ExpertPlace],
    *,
    names: Structure,
    both: tuple[Path, Path],
) -> Told:
    base, tuned = (_snapshot(folder) for folder in both)
    found = {packing: Agreement() for packing in PACKINGS}
    update = 0.0
    with (
        open_pair(base=base, tuned=tuned, names=names.names.applied) as pair,
        TensorReader(headers) as reader,
    ):
        _require_parameters(list(places), headers=pair.headers, both=both)
        for name, place in places.items():
            a, b = _vectors(reader, place)
            ways = {
                packing: (
                    by_expert(a, experts=place.experts, grouping=packing.a),
                    by_expert(b, experts=place.experts, grouping=packing.b),
                )
                for packing in PACKINGS
            }
            for expert, matrix in enumerate(expert_pairs(pair.snapshots, pair.tensors(name))):
                delta = matrix.tuned.float() - matrix.base.float()
                delta = delta.T if place.transposed else delta
                update += float(delta.double().square().sum())
                for packing, (rows, columns) in ways.items():
                    found[packing].add(delta, a=rows[expert].float(), b=columns[expert].float())
    return told_by_update(found, update=update)


def _snapshot(folder: Path) -> Snapshot:
    return Snapshot(checkpoint=Checkpoint(kind="local", name=folder.name, revision="", files=()), folder=folder)


def _require_parameters(
    names: Sequence[str], *, headers: Sides[Mapping[str, TensorHeader]], both: tuple[Path, Path]
) -> None:
    for folder, there in zip(both, headers, strict=True):
        lost = [name for name in names if name not in there]
        if lost:
            raise FetchError(
                f"{folder} has no {lost[0]}", expected="base and fine-tune of the adapter, with their weights"
            )
    other = [name for name in names if headers.base[name].shape != headers.tuned[name].shape]
    if other:
        raise FetchError(f"{other[0]} has another shape in {both[1]} than in {both[0]}", expected="the adapter's base")
