"""What one run is asked to do: the manifest, the stages, where its files go, and where the work is done."""

from dataclasses import dataclass
from pathlib import Path

from publisher.pipeline.table import NAMES


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the pipeline.

    Attributes:
        manifest_file: the manifest.
        dist: where the staged tree and the work folder go.
        device: `auto`, `cpu`, `cuda` or, for the local engine, `cuda:N`.
        engine: where the work is done: `local`, `ray` or `ray://HOST:PORT`.
        model_gpus: how many GPUs a model of verification is spread over.
        variants: paths of the variants to work on; empty for all.
        first: the first stage to run; it runs again even if nothing changed, earlier results are taken as they are.
        last: the last stage to run.
        dry_run: stop before the first write to the Hub.
        rehearse: push to an embedded local Hub in the work folder.
        tag: the tag to set on the commit.
        pull_request: open a pull request instead of committing to the branch.
        stream: read the checkpoints' weights from the Hub as they are needed, and store none of them.
        signing_key: the private key, for a manifest that asks for a signature by one.
    """

    manifest_file: Path
    dist: Path
    device: str = "auto"
    engine: str = "local"
    model_gpus: int = 1
    variants: tuple[str, ...] = ()
    first: str = NAMES[0]
    last: str = NAMES[-1]
    dry_run: bool = False
    rehearse: bool = False
    tag: str | None = None
    pull_request: bool = False
    stream: bool = False
    signing_key: Path | None = None

    def includes(self, stage: str) -> bool:
        """Return whether this stage is part of the run."""
        return NAMES.index(self.first) <= NAMES.index(stage) <= NAMES.index(self.last)

    @property
    def writes(self) -> bool:
        """Whether this run writes to a Hub."""
        return self.includes("push") and not self.dry_run

    @property
    def staged(self) -> Path:
        """The folder of the staged tree."""
        return self.dist / self.manifest_file.stem

    @property
    def work(self) -> Path:
        """The folder of what only this machine needs: markers, digests, finished modules."""
        return self.dist / f"{self.manifest_file.stem}.work"
