"""The first look at a pair: the adapter and its evidence, without a manifest.

The manifest that `publish new` would write for the pair is written to a scratch folder and run up to the verdicts of
the loaders. So a first look gives the very bytes that a release would have, and refuses what a release would refuse.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import yaml

from publisher.api.border import called_with, causes_explained
from publisher.errors import ManifestError
from publisher.manifest.new import new_manifest
from publisher.manifest.reading import parse_manifest
from publisher.pipeline.run import Run, run
from publisher.records.extraction import ExpertTensor, Extraction, ExtractionSummary, ModuleExtraction
from publisher.records.filenames import EXTRACTION
from publisher.records.files import flush, room_in, write_text
from publisher.records.loaders import LoaderVerdict
from publisher.records.new_folder import is_free
from publisher.records.progress import Progress, silent
from publisher.records.validation import Validation

_NAME: Final = "first-look"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ExtractedAdapter:
    """An adapter that was taken out of a merged fine-tune, with its evidence.

    Its files lie in a scratch folder and vanish with this value: `save` keeps them.

    Attributes:
        extraction: all of extraction.json: checkpoints with digests, settings, tools, figures.
        validation: what PEFT made of the adapter.
        loaders: which loaders take the adapter, with which flags.
        folder: where the files are; read them, and do not write there.
    """

    extraction: Extraction
    validation: Validation
    loaders: tuple[LoaderVerdict, ...]
    folder: Path

    @property
    def summary(self) -> ExtractionSummary:
        """The figures of the adapter as a whole."""
        return self.extraction.summary

    @property
    def modules(self) -> tuple[ModuleExtraction, ...]:
        """The figures of each adapted module, sorted by name."""
        return self.extraction.modules

    @property
    def experts(self) -> tuple[ExpertTensor, ...]:
        """The figures of each expert, by the parameter that holds it; none in a model without experts."""
        return self.extraction.experts

    def save(self, folder: str | Path) -> Path:
        """Write the adapter's files and its evidence to a folder, which appears whole or not at all.

        Args:
            folder: a folder that does not exist yet or is empty.

        Returns:
            The folder; `PeftModel.from_pretrained(base, folder)` loads it.

        Raises:
            ManifestError: the folder holds something, or it is a file.
            NoRoomError: the disk is full.
        """
        with causes_explained():
            place = Path(folder).resolve()
            if not is_free(place):
                raise ManifestError(
                    f"{folder} is there already, and what it holds is not touched",
                    expected="a folder that does not exist yet, or is empty",
                    next_step="name another one",
                )
            _copy(self.folder, place)
        return Path(folder)


def extract(  # noqa: PLR0913 - what a manifest would say, each a keyword with a default
    *,
    tuned: str | Path,
    base: str | Path,
    rank: float | Literal["auto"] = "auto",
    method: Literal["svd", "exact"] = "svd",
    ignore: Sequence[str] = (),
    carry: Sequence[str] = (),
    work: str | Path | None = None,
    device: str = "auto",
    engine: str = "local",
    stream: bool = False,
    progress: Progress = silent,
) -> ExtractedAdapter:
    """Take the LoRA adapter out of a merged fine-tune, and check that PEFT loads it.

    No manifest is needed; dtype and task type follow from the checkpoints, as `publish new` reads them.

    Args:
        tuned: the merged fine-tune: a folder, or `owner/name` or `owner/name@revision` on the Hub.
        base: the model that it was made from, named in the same ways.
        rank: a whole number; `auto` for what stands above the rounding of the merge; or a share of each update's
            squared norm to hold at least, such as 0.95.
        method: `svd` for the best fit of its rank; `exact` for factors that merge back to the released weights.
        ignore: names of tensors that may differ and are left out; `*` stands for any text.
        carry: names of tensors that no LoRA can hold and that are stored whole, with their module.
        work: folder in which finished modules are kept, so that the same call goes on after an interruption; without
            it a scratch folder is used that vanishes with the result. It needs room for the adapter, twice.
        device: `auto`, `cpu`, `cuda` or, with the local engine, `cuda:N`.
        engine: where the work is done: `local`, `ray` or `ray://HOST:PORT`.
        stream: read the weights from the Hub as they are needed, and store none of them.
        progress: a function that is called before each piece of work; the default tells nobody.

    Returns:
        The adapter with its evidence.

    Raises:
        ManifestError: an option is wrong.
        FetchError: a checkpoint is missing or damaged.
        HubError: the Hub is out of reach, or has no such repository or revision.
        ExtractionError: the two checkpoints hold no LoRA that can be taken out.
        ValidationError: the written adapter does not do what its evidence says.
        PublisherError: something else failed, such as a full disk.

    Example:
        >>> result = publisher.extract(tuned="models/tuned", base="models/base")
        >>> result.summary.rank, result.modules[0].relative_error
        (8, 0.00291289)
        >>> result.save("adapter")
        PosixPath('adapter')
    """
    shape = {"method": method, "rank": rank if rank == "auto" or isinstance(rank, int) else {"energy": rank}}
    settings = shape | {"ignore": list(ignore), "carry": list(carry)}
    with called_with(progress) as report:
        manifest = _manifest(str(tuned), str(base), settings=settings)
        place = Path(tempfile.mkdtemp(prefix="publisher-") if work is None else work)
        options = Run(place / f"{_NAME}.yaml", place, device=device, engine=engine, stream=stream, last="loaders")
        try:
            result = _run(options, manifest, progress=report)
        except BaseException:
            if work is None:
                shutil.rmtree(place, ignore_errors=True)
            raise
    if work is None:
        weakref.finalize(result, shutil.rmtree, place, ignore_errors=True)
    return result


def _run(options: Run, manifest: str, *, progress: Progress) -> ExtractedAdapter:
    write_text(options.manifest_file, manifest)
    variant = run(options, progress).variants[0]
    return ExtractedAdapter(
        Extraction.read(options.staged / EXTRACTION),
        cast("Validation", variant.validation),  # a run up to the loaders has one
        variant.loaders,
        folder=options.staged,
    )


def _manifest(tuned: str, base: str, *, settings: dict[str, Any]) -> str:
    """Return the text of the pair's manifest with these settings of the adapter, which must be sound."""
    content = yaml.safe_load(new_manifest(tuned=tuned, base=base))
    content["variants"][0]["adapter"] |= settings
    text = yaml.safe_dump(content, sort_keys=False)
    _, problems = parse_manifest(Path(f"{_NAME}.yaml"), text)
    if problems:
        raise ManifestError("\n".join(f"{problem.field}: {problem.what}" for problem in problems))
    return text


def _copy(files: Path, place: Path) -> None:
    """Copy a folder beside its new place, and give it its name when all of it is on disk."""
    partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
    size = sum(file.stat().st_size for file in files.rglob("*") if file.is_file())
    with room_in(place.parent, name=place.name, size=size):
        try:
            shutil.copytree(files, partial)
            for file in partial.rglob("*"):
                if file.is_file():
                    flush(file)
            if place.is_dir():
                place.rmdir()  # empty
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
