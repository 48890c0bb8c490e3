"""What a stage works on: one variant of the manifest, or the release as a whole, with what this run has found there."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from publisher.hub.client import Destination
from publisher.manifest.schema import Manifest, RequestSet, Variant
from publisher.pipeline.options import Run
from publisher.pipeline.table import stage_named
from publisher.records.progress import Progress
from publisher.records.record import Record
from publisher.release.card import card_files
from publisher.release.evidence import load_evidence
from publisher.verification.request_files import RequestFile, read_request_file

if TYPE_CHECKING:
    from publisher.engines import Engine
    from publisher.pipeline.stages.push import Target

_TAKEN = frozenset({"root", "hub", "lock", "lock.holder", "digests.json", "variants"})  # names in the work folder

T = TypeVar("T")
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Site:
    """What every stage works with.

    Attributes:
        options: what the run was asked to do.
        manifest: the manifest, read and checked.
        progress: told of each piece of work.
        found: what the stages of this run gave, by the stage's name.
    """

    options: Run
    manifest: Manifest
    progress: Progress
    found: dict[str, object] = field(default_factory=dict, kw_only=True)

    @property
    def staged(self) -> Path:
        """The folder of its published files."""
        return self.options.staged

    def kept(self, name: str) -> Path:
        """Return the place of a file that only this machine needs."""
        return self.options.work / name

    def folder_of(self, stage: str) -> Path:
        """Return the folder in which this stage leaves its files."""
        return self.staged if stage_named(stage).published else self.kept("")

    def given(self, stage: str, kind: type[T]) -> T | None:
        """Return what this stage gave in this run; None where it did not run, or gave something else."""
        found = self.found.get(stage)
        return found if isinstance(found, kind) else None

    def result(self, stage: str, kind: type[R]) -> R:
        """Return the record of this stage: the one that this run made, or the one that an earlier run left.

        Raises:
            FetchError: there is none, or it is damaged.
        """
        made = self.given(stage, kind)
        return made if made is not None else kind.read(self.folder_of(stage) / stage_named(stage).writes[0])


@dataclass(frozen=True)
class VariantSite(Site):
    """One variant.

    Attributes:
        variant: the manifest's entry.
        hashed: the checkpoints' files that this run has hashed.
        engine: where tensors are compared and models run; None while no stage of a variant runs.
    """

    variant: Variant
    hashed: set[Path] = field(default_factory=set, kw_only=True)
    engine: "Engine | None" = field(default=None, kw_only=True)

    @property
    def staged(self) -> Path:
        """The variant's folder in the staged tree."""
        return self.options.staged / self.variant.folder

    def kept(self, name: str) -> Path:
        """Return the place of a file in the variant's own folder of the work folder."""
        folder = self.variant.folder or "root"
        taken = self.variant.folder.partition("/")[0].casefold() in _TAKEN
        return self.options.work / ("variants" if taken else "") / folder / name

    @property
    def memo(self) -> Path:
        """The file with the digests of checkpoints that earlier runs found."""
        return self.options.work / "digests.json"

    @property
    def verifies(self) -> bool:
        """Whether this run includes a verification of the variant."""
        return self.variant.verification is not None and self.options.includes("verify")

    @cached_property
    def request_files(self) -> tuple[RequestFile, ...]:
        """The request files of the manifest's sets, read and checked once."""
        settings = self.variant.verification
        if settings is None:
            return ()
        return tuple(
            read_request_file(_request_file(one, self.progress), name=one.file, runner=settings.runner, limit=one.limit)
            for one in settings.sets
        )


def _request_file(one: RequestSet, progress: Progress) -> Path:
    if (dataset := one.dataset) is None:
        return Path(one.file)
    from publisher.hub import client as hub

    progress(f"fetching {one.file} of {dataset.repo}@{dataset.revision[:8]}")
    return hub.download_from_dataset(dataset.repo, dataset.revision, filename=one.file)


@dataclass(frozen=True)
class ReleaseSite(Site):
    """The release as a whole.

    Attributes:
        target: where and how to push.
        variants: every variant of the manifest, also those that this run does not work on.
    """

    target: "Target"
    variants: tuple[VariantSite, ...]

    @property
    def hub(self) -> Destination:
        """The Hub that this run pushes to."""
        return self.target.destination

    def rendered_card(self) -> dict[str, str]:
        """Return README.md and its charts from the JSON artefacts alone, by path in the release.

        Raises:
            CardError: evidence is missing or not the manifest's, or a template is wrong.
            FetchError: an artefact is damaged.
        """
        evidence = load_evidence(self.manifest, self.staged)
        return card_files(self.manifest, evidence, beside=self.options.manifest_file.parent)
