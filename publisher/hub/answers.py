"""What a Hub's answer says, checked field by field: every one of them is of the server's making.

Paths, commit ids, digests and numbers are refused unless they are plain; a name or an address is one line of printable
text. Whatever `reading`, `commits` and `downloads` return has passed here.
"""

import re
from dataclasses import dataclass

from huggingface_hub.hf_api import RepoFile

from publisher.border.escape import for_terminal
from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.errors import HubError
from publisher.hub.destination import Destination

SAID = 300  # characters of what a server said that a message repeats
_COMMIT_ID = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PULL_REQUEST = re.compile(r"refs/pr/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit.

    Attributes:
        path: relative path inside the repository, with forward slashes.
        size: bytes of the file.
        blob: git's id of the file, or of its LFS pointer.
        sha256: digest of the content; known for files in LFS or Xet alone.
    """

    path: str
    size: int
    blob: str
    sha256: str | None


def remote_file(entry: RepoFile, at: Destination) -> RemoteFile:
    """Return one entry of a listing.

    Raises:
        HubError: a field of it is not what the Hub sends.
    """
    size = entry.size
    digest = entry.lfs.sha256 if entry.lfs else None
    if type(size) is not int or not 0 <= size <= LIMITS.file_bytes:
        raise foreign(at, f"lists a file of {_shown(size)} bytes", expected=f"0 to {LIMITS.file_bytes:,}")
    if digest is not None and not _is(digest, _DIGEST):
        raise foreign(at, f"lists a file with the SHA-256 {_shown(digest)}", expected="64 hex digits")
    if not _is(entry.blob_id, _COMMIT_ID) and not _is(entry.blob_id, _DIGEST):
        raise foreign(at, f"lists a file with the git id {_shown(entry.blob_id)}", expected="40 or 64 hex digits")
    return RemoteFile(plain_path(entry.path, at), size, entry.blob_id, digest)


def plain_path(path: object, at: Destination) -> str:
    """Return a file's name that stays inside its repository, and inside the cache.

    Raises:
        HubError: it does not, or is no text.
    """
    try:
        if not isinstance(path, str):
            raise ValueError("it is no text")  # noqa: TRY004, TRY301 - one fault among those of a path
        return repository_path(path)
    except ValueError as error:
        raise foreign(at, f"names the file {_shown(path)}: {error}", expected="a plain relative path") from None


def commit_id(value: object, at: Destination) -> str:
    """Return a full commit id.

    Raises:
        HubError: it is none.
    """
    if not isinstance(value, str) or not _COMMIT_ID.fullmatch(value):
        raise foreign(at, f"names the commit {_shown(value)}", expected="40 hex digits")
    return value


def word(value: object, at: Destination) -> str:
    """Return a name or an address, which is shown to people as it is.

    Raises:
        HubError: it is not one short line of printable text.
    """
    if not isinstance(value, str) or len(value) > LIMITS.path_characters or for_terminal(value) != value:
        raise foreign(at, f"answers with {_shown(value)}", expected="one line of printable text")
    return value


def pull_request_number(ref: object, at: Destination) -> int:
    """Return the number in a reference such as `refs/pr/12`.

    Raises:
        HubError: it is no such reference.
    """
    found = _PULL_REQUEST.fullmatch(ref) if isinstance(ref, str) else None
    if found is None:
        raise foreign(at, f"lists the pull request {_shown(ref)}", expected="refs/pr/ and a number")
    return int(found[1])


def foreign(at: Destination, found: str, *, expected: str) -> HubError:
    """Return the error for an answer that no Hub gives.

    Args:
        at: the Hub that gave it.
        found: what it did, as a clause whose subject is the Hub.
        expected: what a Hub answers.

    Returns:
        The error, to be raised.
    """
    return HubError(f"{at.label} {found}", expected=expected, next_step="check HF_ENDPOINT, and the repository there")


def _is(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


def _shown(value: object) -> str:
    text = value[:SAID] if isinstance(value, str) else repr(value)[:SAID]
    return for_terminal(text) or "''"
