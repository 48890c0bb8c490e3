"""What a repository holds: its commits, files, tags, licence, pull requests, and who can see it. Nothing is written."""

from itertools import islice, takewhile

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from publisher.border.limits import LIMITS
from publisher.errors import HubError, MissingRepositoryError
from publisher.hub.answers import RemoteFile, commit_id, foreign, pull_request_number, remote_file, word
from publisher.hub.destination import THE_HUB, Destination
from publisher.hub.failures import explained

_WAITING = frozenset({"open", "draft"})


def resolve_revision(repo: str, revision: str, *, at: Destination = THE_HUB) -> str:
    """Return the full commit id of a branch, tag or abbreviated commit.

    Args:
        repo: `owner/name` of a model repository.
        revision: the branch, tag or commit.
        at: the Hub that is asked.

    Returns:
        40 hex digits.

    Raises:
        HubError: no such repository or revision, no access, or no connection.
    """
    with explained(repo, revision, at=at):
        sha = at.api.model_info(repo, revision=revision).sha
    if sha is None:
        raise HubError(f"{repo} has no commit yet", next_step="name a repository that holds a checkpoint")
    return commit_id(sha, at)


def license_of(repo: str, revision: str) -> str | None:
    """Return the licence that the repository's card states, if it has a card that states one."""
    with explained(repo, revision):
        card = HfApi().model_info(repo, revision=revision).card_data
    value = card.get("license") if card else None
    return value if isinstance(value, str) else None


def list_files(repo: str, revision: str, *, at: Destination = THE_HUB) -> tuple[RemoteFile, ...]:
    """Return every file of the repository at this revision.

    Args:
        repo: `owner/name` of a model repository.
        revision: branch, tag or commit.
        at: the Hub that is asked.

    Returns:
        The files, sorted by path.

    Raises:
        HubError: they could not be listed, are too many, or one of them has a name that leads elsewhere.
    """
    with explained(repo, revision, at=at):
        listing = at.api.list_repo_tree(repo, recursive=True, revision=revision)
        entries = list(islice(listing, LIMITS.repository_files + 1))
    if len(entries) > LIMITS.repository_files:
        found = f"lists more than {LIMITS.repository_files:,} files"
        raise foreign(at, found, expected=f"at most {LIMITS.repository_files:,} files")
    files = (remote_file(entry, at) for entry in entries if isinstance(entry, RepoFile))
    return tuple(sorted(files, key=lambda file: file.path))


def is_public(repo: str, revision: str) -> bool:
    """Return whether anyone can see the repository at this revision, without a token."""
    try:
        with explained(repo, revision):
            HfApi().model_info(repo, revision=revision, token=False)
    except MissingRepositoryError:
        return False
    return True


def tags(repo: str, *, at: Destination = THE_HUB) -> dict[str, str]:
    """Return each tag and the id of the commit that it points to."""
    with explained(repo, "", at=at):
        found = at.api.list_repo_refs(repo).tags
    return {word(ref.name, at): commit_id(ref.target_commit, at) for ref in found}


def commits_since(repo: str, commit: str, *, branch: str, at: Destination = THE_HUB) -> tuple[str, ...]:
    """Return the commits that a branch has gained since a commit.

    Args:
        repo: `owner/name` of a model repository.
        commit: id of the commit that was its head.
        branch: name of the branch.
        at: the Hub that is asked.

    Returns:
        The ids of the later commits, oldest first.
    """
    with explained(repo, branch, at=at):
        newest_first = [commit_id(entry.commit_id, at) for entry in at.api.list_repo_commits(repo, revision=branch)]
    return tuple(takewhile(lambda found: found != commit, newest_first))[::-1]


def pull_requests(repo: str, *, at: Destination = THE_HUB) -> dict[int, str]:
    """Return each pull request's number, closed ones included, and the commit it is at; the newest comes first."""
    with explained(repo, "", at=at):
        refs = at.api.list_repo_refs(repo, include_pull_requests=True)
    commits = {pull_request_number(ref.ref, at): commit_id(ref.target_commit, at) for ref in refs.pull_requests or ()}
    return dict(sorted(commits.items(), reverse=True))


def is_open(repo: str, pull_request: int, *, at: Destination = THE_HUB) -> bool:
    """Return whether a pull request waits to be merged.

    Args:
        repo: `owner/name` of a model repository.
        pull_request: number of the pull request.
        at: the Hub that is asked.

    Returns:
        Whether it is open, or a draft.
    """
    with explained(repo, "", at=at):
        return at.api.get_discussion_details(repo, pull_request).status in _WAITING
