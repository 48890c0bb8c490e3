"""Push: the staged tree becomes one commit, or none.

The commit names the head it was compared with, so that it lands on that or not at all. Where the answer is lost,
the repository is read again: what has landed is recognised, and never written twice.

It refuses local checkpoints on any Hub but the embedded one, since nobody could check them, and a tag that points
elsewhere.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from publisher.errors import HubError, PushError, StaleParentError, UnclearAnswerError
from publisher.hub import client as hub
from publisher.hub.client import Destination, NewCommit
from publisher.manifest.schema import Manifest
from publisher.records.progress import Octets, Progress, silent
from publisher.records.publication import CommitPlan, Pushed, Result
from publisher.release.commitplan import BRANCH, head_of, holds_bytes, plan_push

_LOOK_AGAIN = (0.0, 1.0, 3.0)  # seconds before each look for a commit whose answer was lost
_AGAIN = "run the same command again: a commit that has landed is recognised, and not made twice"
_WRITES = frozenset({"added", "changed"})


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to push: which Hub, the tag to set, and whether to open a pull request instead."""

    destination: Destination = hub.THE_HUB
    tag: str | None = None
    pull_request: bool = False


# --- before any long stage ----------------------------------------------------------------------------------


def preflight(manifest: Manifest, target: Target) -> None:
    """Raise if the push would fail in the end for a reason that can be known at the start.

    Raises:
        PushError: what this manifest or these options do not allow.
        HubError: no token, one that may not write, or a reference that readers could not check.
    """
    if manifest.is_local and not target.destination.rehearsal:
        raise PushError(
            "the manifest names local checkpoints, which nobody else could check",
            expected="repo and revision in every source and base",
            next_step="rehearse with --hub local, or stop before the Hub with --dry-run",
        )
    _require_tag_name(target)
    _require_write_access(manifest, target)
    if not target.destination.rehearsal:
        _require_public(manifest)
    _require_free_tag(manifest, target)


def _require_tag_name(target: Target) -> None:
    if target.tag is not None and target.pull_request:
        raise PushError("--tag marks what is on the branch, which --pr leaves as it is", next_step="give one of them")
    if target.tag is not None and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", target.tag):
        raise PushError(f"'{target.tag}' is not a tag name", expected="letters, digits, '.', '_', '+', '-': v1.2.0")


def _require_write_access(manifest: Manifest, target: Target) -> None:
    at = target.destination
    account = hub.account(at)
    trusted = hub.trusted_repository()
    if account is None and trusted != manifest.repo:
        raise HubError(
            f"trusted publishing is set up for {trusted}", expected=manifest.repo, next_step="correct HF_OIDC_RESOURCE"
        )
    if account is not None and account.read_only:
        raise HubError("the Hub token is for reading only", next_step="use a token with write access, in HF_TOKEN")
    if head_of(manifest.repo, at) is not None:
        if account is not None and not target.pull_request:  # others may open pull requests
            hub.require_write(manifest.repo, at=at)
        return
    if at.rehearsal:
        return
    owner = manifest.repo.partition("/")[0]
    if account is None or owner not in account.owners:
        raise HubError(
            f"there is no repository {manifest.repo}, and this token may not create it",
            next_step=f"create it on the Hub, or use a token of {owner}",
        )


def _require_public(manifest: Manifest) -> None:
    references = {(ref.repo or "", ref.revision or "") for v in manifest.variants for ref in (v.source, v.base)}
    hidden = sorted(repo for repo, revision in references if not hub.is_public(repo, revision))
    if hidden:
        raise PushError(
            f"{', '.join(hidden)} cannot be seen without a token, so readers could not check the release",
            expected="public sources and bases",
            next_step="make them public, or publish from public ones",
        )


def _require_free_tag(manifest: Manifest, target: Target) -> None:
    """Raise if the tag is there and not on the head: only where nothing has changed can it stay."""
    if target.tag is None or (head := head_of(manifest.repo, target.destination)) is None:
        return
    commit = hub.tags(manifest.repo, at=target.destination).get(target.tag)
    if commit not in {None, head}:
        raise _elsewhere(target.tag, commit or "", head)


def _elsewhere(tag: str, found: str, expected: str) -> PushError:
    return PushError(
        f"the tag {tag} points to {found[:8]}", expected=expected[:8], next_step="choose a new tag; tags do not move"
    )


# --- the push -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Landed:
    """The release on the Hub; `recovered` where the answer was lost and the repository told."""

    commit: NewCommit
    recovered: bool


def push(manifest: Manifest, staged: Path, *, target: Target, progress: Progress = silent) -> Pushed:
    """Make the commit, unless the repository holds it already, and set the tag.

    Args:
        manifest: what is published.
        staged: the staged tree, whose files are the release.
        target: where and how to push.
        progress: told of each upload.

    Returns:
        What happened on the Hub, and the commit that holds the release now.

    Raises:
        PushError: the head moved, or no answer came; nothing was written, or the message says what may have been.
        HubError: the Hub refused.
    """
    at = target.destination
    plan = plan_push(manifest, staged, at=at)
    if plan.parent is None:
        _create(manifest.repo, at)
        plan = plan_push(manifest, staged, at=at)
    message = f"Publish {manifest.card.title}{f' {target.tag}' if target.tag else ''}"
    return carry_out(plan, staged, message=message, target=target, progress=progress)


def _create(repo: str, at: Destination) -> None:
    try:
        hub.create_repository(repo, at=at)
    except UnclearAnswerError:
        if head_of(repo, at) is None:
            raise


def carry_out(plan: CommitPlan, root: Path, *, message: str, target: Target, progress: Progress = silent) -> Pushed:
    """Make the planned commit, unless it would change nothing, and set the tag.

    Args:
        plan: the commit, compared with the repository's head.
        root: the folder below which its files are.
        message: the commit's message.
        target: where and how to push.
        progress: told of each upload.

    Returns:
        What happened on the Hub, and the commit that holds the files now.

    Raises:
        PushError: the head moved, or no answer came; nothing was written, or the message says what may have been.
        HubError: the Hub refused.
    """
    parent, at = plan.parent or "", target.destination
    if all(operation.change == "same" for operation in plan.operations):
        landed = _Landed(NewCommit(parent, f"{at.address}/{plan.repo}/tree/{parent}"), recovered=False)
        return _outcome(landed, plan.repo, target=target, result="no changes")
    _require_unused_tag(plan.repo, target)
    if target.pull_request and (opened := _in_pull_request(plan, root, at=at)) is not None:
        return _outcome(_Landed(opened, recovered=False), plan.repo, target=target, result="pull request")
    landed = _commit(plan, root, message=message, target=target, progress=progress)
    return _outcome(landed, plan.repo, target=target, result="pull request" if target.pull_request else "committed")


def _outcome(landed: _Landed, repo: str, *, target: Target, result: Result) -> Pushed:
    if target.tag is not None:
        _set_tag(repo, target.tag, commit=landed.commit.id, at=target.destination)
    return Pushed(
        hub=target.destination.label,
        result=result,
        commit=landed.commit.id,
        url=landed.commit.url,
        tag=target.tag,
        recovered=landed.recovered,
    )


def _require_unused_tag(repo: str, target: Target) -> None:
    if target.tag is None:
        return
    commit = hub.tags(repo, at=target.destination).get(target.tag)
    if commit is not None:
        raise PushError(
            f"the tag {target.tag} is on {commit[:8]}, and this release differs from that commit",
            next_step="choose a new tag; tags do not move",
        )


def _commit(plan: CommitPlan, root: Path, *, message: str, target: Target, progress: Progress) -> _Landed:
    changes: dict[str, Path | None] = {op.path: root / op.path for op in plan.operations if op.change in _WRITES}
    changes |= dict.fromkeys(op.path for op in plan.operations if op.change == "deleted")
    try:
        made = hub.commit(
            plan.repo,
            changes=changes,
            message=message,
            parent=plan.parent or "",
            pull_request=target.pull_request,
            at=target.destination,
            on_upload=_uploads(plan, progress),
        )
    except (StaleParentError, UnclearAnswerError) as error:
        return _Landed(_found_after(error, plan, root, target=target), recovered=True)
    return _Landed(made, recovered=False)


def _uploads(plan: CommitPlan, progress: Progress) -> Callable[[str], None]:
    """Return a function that reports which file is on its way, and how much of the commit has gone before."""
    sizes = {op.path: op.size or 0 for op in plan.operations if op.change in _WRITES}
    sent: list[str] = []

    def report(path: str) -> None:
        progress(f"uploading {path}", sum(sizes[before] for before in sent), Octets(sum(sizes.values())))
        sent.append(path)

    return report


def _found_after(error: HubError, plan: CommitPlan, root: Path, *, target: Target) -> NewCommit:
    """Return the commit whose answer was lost, found in the repository.

    A commit is not sent again: one that lands late would then be made twice as a pull request.
    """
    at, parent = target.destination, plan.parent or ""
    try:
        for pause in _LOOK_AGAIN:
            time.sleep(pause)
            since = hub.commits_since(plan.repo, parent, branch=BRANCH, at=at)
            found = (
                _in_pull_request(plan, root, at=at)
                if target.pull_request
                else _on_branch(plan, root, commits=since, at=at)
            )
            if found is not None:
                return found
            if since:
                raise _moved(plan.repo, parent, since[-1])
    except HubError as silence:
        raise PushError(
            f"{error.found}, and the repository cannot be read to see whether the commit landed ({silence.found})",
            next_step=_AGAIN,
        ) from error
    raise PushError(f"{error.found}; the repository is as it was: nothing was written", next_step=_AGAIN) from error


def _moved(repo: str, parent: str, head: str) -> PushError:
    return PushError(
        f"{repo} moved from {parent[:8]} to {head[:8]} while this ran; nothing was written",
        expected="nobody else to push meanwhile",
        next_step="look at what changed there, then run the same command again",
    )


def _on_branch(plan: CommitPlan, root: Path, *, commits: Sequence[str], at: Destination) -> NewCommit | None:
    """Return the first of these commits that holds the release: others may have been made on top of it."""
    found = next((commit for commit in commits if _holds(plan, root, commit=commit, at=at)), None)
    return NewCommit(found, f"{at.address}/{plan.repo}/commit/{found}") if found else None


def _in_pull_request(plan: CommitPlan, root: Path, *, at: Destination) -> NewCommit | None:
    """Return the open pull request that holds the release already, so that none is opened twice."""
    for number, commit in hub.pull_requests(plan.repo, at=at).items():
        if _holds(plan, root, commit=commit, at=at) and hub.is_open(plan.repo, number, at=at):
            return NewCommit(commit, f"{at.address}/{plan.repo}/discussions/{number}")
    return None


def _holds(plan: CommitPlan, root: Path, *, commit: str, at: Destination) -> bool:
    """Return whether this commit holds everything that the plan writes, and nothing that it deletes."""
    there = {file.path: file for file in hub.list_files(plan.repo, commit, at=at)}
    for operation in plan.operations:
        remote = there.get(operation.path)
        if operation.change == "deleted" and remote is not None:
            return False
        if operation.change != "deleted" and not holds_bytes(remote, operation.sha256, local=root / operation.path):
            return False
    return True


def _set_tag(repo: str, tag: str, *, commit: str, at: Destination) -> None:
    if (there := hub.tags(repo, at=at).get(tag)) is None:
        try:
            hub.create_tag(repo, tag, revision=commit, at=at)
        except UnclearAnswerError as error:  # made by a lost answer, or by somebody else at this moment
            there = hub.tags(repo, at=at).get(tag)
            if there is None:
                raise PushError(
                    f"the release is committed as {commit[:8]}, but the tag {tag} is not set: {error.found}",
                    next_step="run the same command again",
                ) from error
    if there not in {None, commit}:
        raise _elsewhere(tag, there or "", commit)
