"""`publish card --from-hub`: the card again, from the evidence that is published; it and its charts are committed.

For a better template or a corrected summary, without the checkpoints and without the machine that extracted. Where
the manifest's words changed, its published copy goes along, since a card must follow from what lies beside it. It
refuses evidence that is not this manifest's, as rendering from a staged tree does.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from publisher.errors import CardError
from publisher.hub import client as hub
from publisher.hub.client import Destination, RemoteFile
from publisher.manifest.reading import load_manifest
from publisher.manifest.schema import Manifest
from publisher.pipeline.stages.push import Target, carry_out, preflight
from publisher.records.checkpoint import FileDigest
from publisher.records.filenames import CARD, EXTRACTION, LOADERS, MANIFEST, VERIFICATION
from publisher.records.files import write_text
from publisher.records.publication import CommitPlan, Pushed
from publisher.release.card import card_files, check_card
from publisher.release.commitplan import BRANCH, compare_with_head
from publisher.release.evidence import load_evidence


@dataclass(frozen=True, slots=True)
class Recarded:
    """The difference between the published card and the one rendered now, and what a push did about it."""

    diff: str
    push: Pushed | None


def card_from_hub(manifest_file: Path, *, write: bool, target: Target) -> Recarded:
    """Render the card from the repository's own JSON at its head, and commit it where that is asked for.

    Args:
        manifest_file: the manifest; templates of its own lie beside it.
        write: commit the card and its charts; otherwise nothing is changed.
        target: the Hub that is asked and written to.

    Returns:
        The difference between the published card and the one rendered now, and what a push did about it.

    Raises:
        CardError: the published evidence is not this manifest's, or the release is signed and would be written to.
        HubError: the repository cannot be read, or refuses.
    """
    manifest = load_manifest(manifest_file)
    if write:
        _require_unsigned(manifest)
        preflight(manifest, target)
    head = hub.resolve_revision(manifest.repo, BRANCH, at=target.destination)
    remote = hub.list_files(manifest.repo, head, at=target.destination)
    with TemporaryDirectory(prefix="publish-card-") as folder:
        root = Path(folder)
        _download(manifest, head, remote=remote, root=root, at=target.destination)
        files = card_files(manifest, load_evidence(manifest, root), beside=manifest_file.parent)
        diff = check_card(files[CARD], root / CARD)
        files[MANIFEST] = manifest_file.read_text(encoding="utf-8")
        for name, text in files.items():
            write_text(root / name, text)
        plan = _plan(manifest, head, remote=remote, root=root, names=tuple(files))
        message = f"Render the card of {manifest.card.title} again"
        return Recarded(diff, carry_out(plan, root, message=message, target=target) if write else None)


def _require_unsigned(manifest: Manifest) -> None:
    """Raise an error if the release is signed: the signature covers the card, and would not hold for a new one."""
    if manifest.sign is not None:
        raise CardError(
            f"{manifest.repo} is signed, and a new card alone would leave a signature that does not hold",
            next_step="publish --manifest MANIFEST --from card, which signs anew",
        )


def _download(manifest: Manifest, head: str, *, remote: tuple[RemoteFile, ...], root: Path, at: Destination) -> None:
    folders = [variant.path.removeprefix("/") for variant in manifest.variants]
    wanted = {CARD, *(f"{folder}{name}" for folder in folders for name in (EXTRACTION, LOADERS, VERIFICATION))}
    names = sorted(wanted & {file.path for file in remote})
    fetched = hub.download_all(manifest.repo, head, filenames=names, cache=root / "cache", at=at)
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(fetched / name, root / name)


def _plan(
    manifest: Manifest, head: str, *, remote: tuple[RemoteFile, ...], root: Path, names: tuple[str, ...]
) -> CommitPlan:
    files = [FileDigest.of(root / name, name=name) for name in names]
    published = [file for file in remote if file.path in names]
    return CommitPlan(
        repo=manifest.repo,
        parent=head,
        compared_with=f"{BRANCH} at {head[:8]}",
        operations=compare_with_head(files, published, staged=root),
    )
