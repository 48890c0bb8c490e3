"""What is written to a repository, and who may write: the repository itself, one commit, a tag.

A request for a commit is sent once. Where its answer is lost the error is `UnclearAnswerError`, and the caller reads
the repository again (`repository.commits_since`).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token

from publisher.errors import HubError, UnclearAnswerError
from publisher.hub.answers import commit_id, word
from publisher.hub.destination import THE_HUB, Destination
from publisher.hub.failures import OIDC_RESOURCE, explained

_LARGE = 1_000_000  # bytes from which a file is sent ahead of the commit


@dataclass(frozen=True, slots=True)
class Account:
    """Whose token it is.

    Attributes:
        owners: the names under which the token may create repositories.
        read_only: whether the token is for reading alone.
    """

    owners: tuple[str, ...]
    read_only: bool


@dataclass(frozen=True, slots=True)
class NewCommit:
    """A commit that landed, on the branch or in a pull request.

    Attributes:
        id: the commit's id, 40 hex digits.
        url: where the commit or the pull request can be seen.
    """

    id: str
    url: str


def account(at: Destination = THE_HUB) -> Account | None:
    """Return whose token is used; None with trusted publishing, whose token belongs to a repository.

    Raises:
        HubError: no token, or one that the Hub does not accept.
    """
    with explained("this account", "", at=at):
        if at.token is None and trusted_repository():
            get_token()
            return None
        if at.token is None and get_token() is None:
            raise HubError("there is no Hub token on this machine", next_step="hf auth login, or set HF_TOKEN")
        answer = at.api.whoami()
        role = answer.get("auth", {}).get("accessToken", {}).get("role")
        names = (answer["name"], *(organisation["name"] for organisation in answer.get("orgs", ())))
    return Account(tuple(word(name, at) for name in names), read_only=role == "read")


def current_token() -> str | None:
    """Return the token that huggingface_hub uses, for handing to another process of this tool; it is never shown."""
    return get_token()


def trusted_repository() -> str | None:
    """Return the repository that trusted publishing is set up for in this environment, if it is."""
    return os.environ.get(OIDC_RESOURCE)


def require_write(repo: str, *, at: Destination = THE_HUB) -> None:
    """Ask the Hub whether this token may write to the repository; nothing is written.

    Raises:
        HubError: it may not.
    """
    with explained(repo, "", at=at):
        at.api.auth_check(repo, write=True)


def create_repository(repo: str, *, at: Destination = THE_HUB) -> None:
    """Create a public model repository; one that is there already is fine."""
    with explained(repo, "", at=at):
        at.api.create_repo(repo, exist_ok=True)


def commit(
    repo: str,
    *,
    changes: Mapping[str, Path | None],
    message: str,
    parent: str,
    pull_request: bool,
    at: Destination = THE_HUB,
    on_upload: Callable[[str], None] = lambda _path: None,
) -> NewCommit:
    """Make one commit of all changes, on top of `parent` or as a pull request. Large files go ahead one by one.

    Args:
        repo: `owner/name` of a model repository.
        changes: for each path in the repository the file with its new content; None deletes it.
        message: the commit's message.
        parent: id of the commit that must be the head of the branch.
        pull_request: whether to open a pull request instead of writing to the branch.
        at: the Hub that is written to.
        on_upload: called with the path of each large file before it is sent.

    Returns:
        The commit that landed.

    Raises:
        StaleParentError: the branch is no longer at `parent`; nothing was written.
        UnclearAnswerError: it may have landed or not.
        HubError: it was refused; nothing was written.
    """
    operations = [
        CommitOperationDelete(path_in_repo=path) if file is None else CommitOperationAdd(path, file)
        for path, file in changes.items()
    ]
    with explained(repo, parent, at=at):
        for operation in operations:
            if isinstance(operation, CommitOperationAdd) and operation.upload_info.size >= _LARGE:
                on_upload(operation.path_in_repo)
                at.api.preupload_lfs_files(repo, [operation], create_pr=pull_request)
        made = at.api.create_commit(
            repo, operations, commit_message=message, parent_commit=parent, create_pr=pull_request
        )
    try:
        return NewCommit(commit_id(made.oid, at), word(made.pr_url or made.commit_url, at))
    except HubError as error:  # it may have landed all the same
        raise UnclearAnswerError(error.found, expected=error.expected, next_step=error.next_step) from None


def create_tag(repo: str, tag: str, *, revision: str, at: Destination = THE_HUB) -> None:
    """Set a tag on a commit.

    Args:
        repo: `owner/name` of a model repository.
        tag: name of the new tag.
        revision: id of the commit.
        at: the Hub that is written to.

    Raises:
        UnclearAnswerError: the tag may be there or not, perhaps made by somebody else at this moment.
    """
    with explained(repo, revision, at=at):
        at.api.create_tag(repo, tag=tag, revision=revision)
