"""Write a sound copy of an adapter that others made wrongly, into a folder of its own; `repairs` says what is certain.

What is written is judged before it appears: PEFT must load all of it. It refuses an adapter in which nothing can be
repaired without guessing, one of this tool's own releases, and a folder that holds something.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from publisher.border.adapterconfig import reduced
from publisher.border.files import regular_files
from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.files import read_json
from publisher.checkpoints.headers import file_headers
from publisher.checkpoints.reading import TensorReader
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.errors import ManifestError, ValidationError, counted, listed
from publisher.loaders import judge
from publisher.loaders.packing import LAYOUT, order_matters, told_packing, words
from publisher.loaders.repairs import REPAIRS, Draft, Repair, numbers, places_of
from publisher.loaders.subject import Base, read_subject, require_readable
from publisher.numerics.packing import PEFT, Grouping, by_expert
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXTRACTION
from publisher.records.files import canonical_json, write_text
from publisher.records.loaders import LoaderVerdict
from publisher.records.new_folder import becoming, is_free
from publisher.records.progress import Progress


def repaired_draft(folder: Path, base: Base, *, source: Path | None) -> tuple[Draft, tuple[str, ...]]:
    """Return an adapter without its defects, and what was changed; nothing is written.

    Args:
        folder: of the adapter.
        base: what is known of its base.
        source: the folder of the merged fine-tune, where it is at hand.

    Returns:
        The draft, and a line for each change; no line where nothing can be repaired for certain.

    Raises:
        FetchError: a file is missing or damaged, or holds a factor that can be none.
        ValidationError: adapter_config.json is not for LoRA, or a known field holds what cannot be meant.
    """
    draft = Draft(read_json(folder / ADAPTER_CONFIG), file_headers(folder / ADAPTER))
    require_readable(folder / ADAPTER, draft.headers)
    draft, first = _applied([numbers], draft, base=base)
    reduced(draft.config)  # whatever follows finds a known field in its type
    draft, others = _applied([*REPAIRS, partial(_packed, source=source)], draft, base=base)
    return draft, (*first, *others)


def _applied(repairs: Sequence[Repair], draft: Draft, *, base: Base) -> tuple[Draft, list[str]]:
    """Return the draft after these repairs, one after the other, and a line for each that changed it."""
    changes = []
    for repair in repairs:
        if (found := repair(draft, base)) is not None:
            draft, change = found
            changes.append(change)
    return draft, changes


def _packed(draft: Draft, base: Base, *, source: Path | None) -> tuple[Draft, str] | None:
    """Return the draft with PEFT's packing, where its experts are clearly packed otherwise."""
    places = {name: place for name, place in places_of(draft, base).items() if order_matters(draft.headers, place)}
    both = (base.folder, source) if source else None
    told = told_packing(draft.headers, places, stated=draft.config.get(LAYOUT), names=base.structure, both=both)
    if told is None or told.other is None:
        return None
    config = {**draft.config, LAYOUT: "rank_major"} if LAYOUT in draft.config else draft.config
    change = f"the factors of {counted(len(places), 'parameter')} packed as PEFT reads them; they had "
    change += f"{words(told.other)}: {told.how}"
    return replace(draft, config=config, packing=told.other, places=places), change


def write_repaired(
    folder: Path, base: Base, *, out: Path, source: Path | None, progress: Progress
) -> tuple[tuple[str, ...], tuple[LoaderVerdict, ...]]:
    """Write a sound copy of an adapter, and return what was changed and what each loader makes of it.

    Args:
        folder: of the adapter.
        base: what is known of its base.
        out: the folder to write, which does not exist yet or is empty.
        source: the folder of the merged fine-tune, where it is at hand.
        progress: told of each piece of work.

    Returns:
        A line for each change, and the verdicts on what was written.

    Raises:
        ManifestError: the folder is taken, or lies in the adapter's, or the adapter is a release of this tool.
        FetchError: a file is missing or damaged.
        ValidationError: nothing can be repaired for certain, or PEFT does not load what was repaired.
        NoRoomError: the disk is too small.
        BusyError: another run writes to the same folder.
    """
    _require_free(out, folder)
    progress(f"looking for what can be repaired in {folder}")
    draft, changes = repaired_draft(folder, base, source=source)
    if not changes:
        raise _nothing_to_repair(folder, base, source=source)
    others = [file for file in regular_files(folder) if file not in (folder / ADAPTER, folder / ADAPTER_CONFIG)]
    size = sum(file.stat().st_size for file in (*others, folder / ADAPTER, folder / ADAPTER_CONFIG))
    with becoming(out, size=size) as written:
        for file in others:
            place = written / file.relative_to(folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
        progress(f"writing {out / ADAPTER}")
        write_text(written / ADAPTER_CONFIG, canonical_json(draft.config))
        _write_tensors(draft, written / ADAPTER)
        progress(f"trying loaders on {out}")
        verdicts = judge(read_subject(written, base, source=source))
        peft = verdicts[0]
        if peft.loads != "yes":
            raise ValidationError(
                f"{folder} cannot be repaired without guessing: after {counted(len(changes), 'repair')}, PEFT finds\n"
                f"{_told(peft)}\n",
                expected="an adapter that PEFT loads whole",
                next_step=_what_helps(peft),
            )
    return changes, verdicts


def _require_free(out: Path, folder: Path) -> None:
    if not is_free(out):
        raise ManifestError(
            f"{out} is there already, and what it holds is not touched",
            expected="a folder that does not exist yet, or is empty",
            next_step="name another one with --repair",
        )
    if out.resolve().is_relative_to(folder.resolve()):
        raise ManifestError(f"{out} lies in the adapter's own folder", next_step="name another one with --repair")
    if (folder / EXTRACTION).is_file():
        raise ManifestError(
            f"{folder} holds an {EXTRACTION}, which would no longer be that of the repaired files",
            expected="an adapter that another program wrote",
            next_step="extract it again: publish extract --manifest MANIFEST",
        )


def _nothing_to_repair(folder: Path, base: Base, *, source: Path | None) -> ValidationError:
    subject = read_subject(folder, base, source=source)
    peft = judge(subject)[0]
    if peft.loads != "yes":
        return ValidationError(
            f"nothing of what speaks against {folder} can be repaired without guessing:\n{_told(peft)}\n",
            next_step=_what_helps(peft),
        )
    if subject.packing is not None and subject.packing.packing is None:
        return ValidationError(
            f"{folder}: how the factors of its experts are packed cannot be told: {subject.packing.how}",
            expected="factors of a training, or the fine-tune that they were merged into",
            next_step="name the folder of the merged fine-tune with --source" if source is None else "",
        )
    return ValidationError(f"there is nothing to repair in {folder}: PEFT loads it as it is meant")


def _told(verdict: LoaderVerdict) -> str:
    return listed([found.what for found in verdict.findings] or verdict.notes)


def _what_helps(verdict: LoaderVerdict) -> str:
    return "; ".join(dict.fromkeys(found.remedy for found in verdict.findings))


def _write_tensors(draft: Draft, path: Path) -> None:
    groupings: dict[str, tuple[int, int, Grouping, Grouping]] = {}
    if draft.packing is not None:
        for place in draft.places.values():
            for dim, key in enumerate(place.keys):
                groupings[key] = (dim, place.experts, draft.packing[dim], PEFT[dim])
    with TensorReader(draft.headers) as reader:

        def load(key: str) -> torch.Tensor:
            tensor = reader.read(key)
            if key not in groupings:
                return tensor
            dim, experts, before, after = groupings[key]
            return _regrouped(tensor.T if dim else tensor, experts=experts, groupings=(before, after), dim=dim)

        planned = {
            key: Planned(header.shape, torch_dtype(header), partial(load, key)) for key, header in draft.headers.items()
        }
        write_tensors(path, planned)


def _regrouped(vectors: torch.Tensor, *, experts: int, groupings: Sequence[Grouping], dim: int) -> torch.Tensor:
    """Return the rows of A (dim 0), or B whose columns are these rows (dim 1), in another grouping."""
    before, after = groupings
    own = by_expert(vectors, experts=experts, grouping=before)
    flat = (own if after == "expert" else own.transpose(0, 1)).flatten(0, 1)
    return flat.T if dim else flat
