"""An audit, from Python."""

from pathlib import Path
from tempfile import TemporaryDirectory

from publisher.api.border import called_with
from publisher.audits import audit as audit_release
from publisher.records.audit import Audit
from publisher.records.progress import Progress, silent


def audit(target: str | Path, *, deep: bool = False, device: str = "auto", progress: Progress = silent) -> Audit:
    """Check a published adapter, or a local folder of one, as `publish audit TARGET` does.

    A check that fails is no exception: it stands in the result.

    Args:
        target: `owner/name` or `owner/name@revision` on the Hub, or a folder.
        deep: also fetch both checkpoints, and work out every figure again.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; used by a deep audit alone.
        progress: a function that is called before each piece of work; the default tells nobody.

    Returns:
        Every check with what was seen; `failed` has those that speak against the release.

    Raises:
        ManifestError: the target is neither a folder nor a repository id, or the device cannot be used.
        HubError: the repository is out of reach.
        FetchError: nothing at the target belongs to an adapter.

    Example:
        >>> [check.name for check in publisher.audit("dist/demo").failed]
        []
    """
    with called_with(progress) as report, TemporaryDirectory(prefix="publisher-audit-") as work:
        return audit_release(str(target), deep=deep, work=Path(work), device=device, progress=report)
