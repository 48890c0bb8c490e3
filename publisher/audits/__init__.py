"""Audit: what a sceptical reader of a published adapter runs, from the published files alone.

Every check is a small function that returns what it saw or raises what speaks against the release, so that one
that fails never hides another. An adapter that another tool published is checked as far as its files go, and what
cannot be checked is said, never passed over (docs/audit.md).

Nothing that a repository holds is run: no pickle is opened, no code of a model or a template from the repository
is used, and only files of the names that this tool publishes are downloaded.

Begin with `audit` below; `release` has the checks of the whole, `adapter` and `evidence` those of each adapter, `deep`
those that fetch the checkpoints. `meaning` compares cards of other versions.
"""

from collections.abc import Iterator
from pathlib import Path

from publisher.audits.adapter import Adapter, adapter_checks
from publisher.audits.deep import Bench, deep_checks
from publisher.audits.evidence import evidence_checks
from publisher.audits.release import Release, open_release, release_checks
from publisher.records.audit import Audit, Check
from publisher.records.progress import Progress


def audit(target: str, *, deep: bool, work: Path, device: str, progress: Progress) -> Audit:
    """Run every check of one release.

    Args:
        target: `owner/name`, `owner/name@revision`, or a local folder.
        deep: also fetch base and tuned, and work out every figure again.
        work: a folder for what only this machine needs.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; used where `deep`.
        progress: told of each piece of work.

    Returns:
        What each check found.

    Raises:
        ManifestError: the target is neither a folder nor a repository id, or the device cannot be used.
        HubError: the repository cannot be had.
        FetchError: nothing at the target belongs to an adapter.
    """
    release = open_release(target, progress, scratch=work)
    own = release.revision is None
    bench = Bench.of(work, device=device, progress=progress, own_folders=own) if deep else None
    return Audit(repo=release.name, revision=release.revision, checks=tuple(_checks(release, bench, progress)))


def _checks(release: Release, bench: Bench | None, progress: Progress) -> Iterator[Check]:
    yield from release_checks(release)
    for path, folder in release.adapter_folders():
        progress(f"auditing {path}")
        adapter = Adapter.read(path, folder, variant=release.variant(path))
        yield from adapter_checks(adapter)
        yield from evidence_checks(adapter)
        if bench is not None:
            yield from deep_checks(adapter, bench)
