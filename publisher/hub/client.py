"""The Hugging Face Hub: the only module that calls huggingface_hub's client; `hubdoor` guards its connections.

Each function asks one thing and answers with plain values, or raises one `HubError` that says what to do. The
endpoint and the token are huggingface_hub's own business (HF_ENDPOINT, HF_TOKEN, `hf auth login`, trusted
publishing), unless a `Destination` names others; neither a token nor a header ever enters a message.
"""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, Self

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_token,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    OIDCError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented for use, though not in __all__
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from publisher.border.causes import explained
from publisher.border.escape import for_terminal
from publisher.border.limits import LIMITS
from publisher.border.paths import repository_path
from publisher.errors import (
    HubError,
    MissingFileError,
    MissingRepositoryError,
    MissingRevisionError,
    PublisherError,
    StaleParentError,
    UnclearAnswerError,
)
from publisher.hub import door as hubdoor
from publisher.records.files import no_room

_PARTIAL = 206
_UNAUTHORIZED, _FORBIDDEN, _CONFLICT, _STALE = 401, 403, 409, 412
_PASSING = frozenset({408, 429, *range(500, 600)})  # the same request may well succeed a little later
_OIDC = "HF_OIDC_RESOURCE"
_EXCHANGE = "/oauth/token"
_CARD = "correct the manifest or the card's template, then: publish card --manifest MANIFEST"
_WAITING = frozenset({"open", "draft"})
_UNSENDABLE = "LocalProtocolError"  # of httpx, under either name
_TRANSPORT = frozenset({"httpx", "httpcore", "httpx2", "httpcore2"})  # the client's, under either name
_LARGE = 1_000_000  # bytes from which a file is sent ahead of the commit
_PATIENCE = 5  # how often in a row a range may break without a byte of it having come
_AT_ONCE = 8  # files that are downloaded at the same time
_SAID = 300  # characters of what a server said that a message repeats
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)  # RuntimeError: hf_xet
_COMMIT_ID = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PULL_REQUEST = re.compile(r"refs/pr/([0-9]{1,9})")
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 8.0  # seconds before a broken range is asked for again


@dataclass(frozen=True, slots=True)
class Destination:
    """Which Hub: huggingface_hub's own configuration, or a named endpoint with its token.

    Attributes:
        endpoint: absent for HF_ENDPOINT, or the Hub's own address.
        token: absent for huggingface_hub's own; never shown.
        rehearsal: whether this is the embedded local Hub, where local checkpoints may be published.
    """

    endpoint: str | None = None
    token: str | None = field(default=None, repr=False)
    rehearsal: bool = False

    @property
    def address(self) -> str:
        """The endpoint's URL."""
        return self.endpoint or constants.ENDPOINT

    @property
    def label(self) -> str:
        """How reports name it."""
        return f"local Hub at {self.address}" if self.rehearsal else self.address

    @property
    def api(self) -> HfApi:
        """The client."""
        return HfApi(endpoint=self.endpoint, token=self.token)


THE_HUB = Destination()
hubdoor.install()


@contextmanager
def embedded(endpoint: str, token: str) -> Iterator[Destination]:
    """Give the local Hub that this process runs as a destination, which is reached offline and past any proxy."""
    with hubdoor.embedded(endpoint):
        yield Destination(endpoint, token, rehearsal=True)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a repository at one commit; `sha256` is known for LFS and Xet files, `blob` for all."""

    path: str
    size: int
    blob: str
    sha256: str | None


@dataclass(frozen=True, slots=True)
class Account:
    """Whose token it is: the names under which it may create repositories, and whether it is for reading only."""

    owners: tuple[str, ...]
    read_only: bool


@dataclass(frozen=True, slots=True)
class NewCommit:
    """A commit that landed, on the branch or in a pull request, and where it is seen."""

    id: str
    url: str


# --- reading ------------------------------------------------------------------------------------------------


def resolve_revision(repo: str, revision: str, *, at: Destination = THE_HUB) -> str:
    """The full commit id of a branch, tag or abbreviated commit.

    Raises:
        HubError: no such repository or revision, no access, or no connection.
    """
    with _explained(repo, revision, at=at):
        sha = at.api.model_info(repo, revision=revision).sha
    if sha is None:
        raise HubError(f"{repo} has no commit yet", next_step="name a repository that holds a checkpoint")
    return _commit_id(sha, at)


def license_of(repo: str, revision: str) -> str | None:
    """The licence that the repository's card states, if it has a card that states one."""
    with _explained(repo, revision):
        card = HfApi().model_info(repo, revision=revision).card_data
    value = card.get("license") if card else None
    return value if isinstance(value, str) else None


def list_files(repo: str, revision: str, *, at: Destination = THE_HUB) -> tuple[RemoteFile, ...]:
    """Every file of the repository at this revision, sorted by path."""
    with _explained(repo, revision, at=at):
        listing = at.api.list_repo_tree(repo, recursive=True, revision=revision)
        entries = list(islice(listing, LIMITS.repository_files + 1))
    if len(entries) > LIMITS.repository_files:
        found = f"lists more than {LIMITS.repository_files:,} files"
        raise _foreign(at, found, expected=f"at most {LIMITS.repository_files:,} files")
    files = (_remote_file(entry, at) for entry in entries if isinstance(entry, RepoFile))
    return tuple(sorted(files, key=lambda file: file.path))


def is_cached(repo: str, revision: str, *, filename: str) -> bool:
    """Whether huggingface_hub's cache holds this file at this commit, so that no network is needed for it."""
    return isinstance(try_to_load_from_cache(repo, filename, revision=revision), str)


def download(
    repo: str,
    revision: str,
    *,
    filename: str,
    at: Destination = THE_HUB,
    heard: Callable[[int], None] | None = None,
) -> Path:
    """One file at a full commit id, in huggingface_hub's cache; `heard` is told of each piece of so many bytes.

    Raises:
        MissingFileError: the repository has no such file.
        HubError: it could not be had.
    """
    with _explained(repo, revision, filename=filename, at=at):
        return _fetched(repo, revision, filename=filename, at=at, heard=heard)


def _fetched(
    repo: str,
    revision: str,
    *,
    filename: str,
    at: Destination,
    heard: Callable[[int], None] | None = None,
    cache: Path | None = None,
) -> Path:
    """One file, in the cache; nothing is written before its name and its size are known to be sound."""
    _plain(filename, at)
    size = None
    if not isinstance(try_to_load_from_cache(repo, filename, revision=revision, cache_dir=cache), str):
        size = _knock(repo, revision, filename=filename, at=at)
    bar: Any = _listening(heard, _Room(filename, size, at=at))
    return Path(at.api.hf_hub_download(repo, filename, revision=revision, cache_dir=cache, tqdm_class=bar))


@dataclass
class _Room:
    """How much of a file may still come; `size` is what the server has stated, if it has."""

    filename: str
    size: int | None
    at: Destination
    taken: int = 0

    def __post_init__(self) -> None:
        free = _free_room()
        if (self.size or 0) > free:
            raise no_room(
                Path(constants.HF_HUB_CACHE), name=self.filename, size=self.size or 0, reason="too little is free"
            )

    def take(self, octets: int) -> None:
        """Count what has come; refuse what was not announced."""
        self.taken += octets
        most = LIMITS.unsized_bytes if self.size is None else self.size
        if self.taken > most:
            found = f"sends more of {for_terminal(self.filename)} than the {most:,} bytes that it has stated"
            raise _foreign(self.at, found, expected="the file as it was announced")


def _free_room() -> int:
    """The bytes that are free where huggingface_hub keeps its cache."""
    cache = Path(constants.HF_HUB_CACHE).absolute()
    return shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free


def _listening(heard: Callable[[int], None] | None, room: _Room) -> type:
    """What the client takes for the class of a progress bar; it draws nothing, and passes on what has come."""

    def counted(octets: int) -> None:
        room.take(octets)
        if heard:
            heard(octets)

    class Listening:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            counted(initial)

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing was begun."""

        def update(self, octets: float | None = 1) -> None:
            counted(int(octets or 0))

        def nothing(self, *_: object, **__: object) -> None:
            """Nothing is drawn; of what Xet tells twice, bytes that came in and bytes written, the latter count."""

        update_transfer = set_postfix_str = set_transfer_postfix_str = close = nothing

    return Listening


def _knock(repo: str, revision: str, *, filename: str, at: Destination) -> int | None:
    """One request without retries, so that a closed door is told at once: the client would try for 20 seconds.

    A Hub that answers, be it with a refusal, is left to the client. Gives the file's size, if the Hub states it.
    """
    url = hf_hub_url(repo, filename, revision=revision, endpoint=at.endpoint)
    with suppress(HfHubHTTPError):
        return at.api.get_hf_file_metadata(url=url).size
    return None


def download_all(
    repo: str, revision: str, *, filenames: Sequence[str], cache: Path | None = None, at: Destination = THE_HUB
) -> Path:
    """Several files at a full commit id, in parallel; the folder that holds them in huggingface_hub's cache."""

    def fetched(filename: str) -> Path | None:
        try:
            return _fetched(repo, revision, filename=filename, at=at, cache=cache)
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            return None  # what is missing is seen by whoever looks into the folder

    with _explained(repo, revision, at=at), ThreadPoolExecutor(_AT_ONCE) as threads:
        files = dict(zip(filenames, threads.map(fetched, filenames), strict=True))
    for name, file in files.items():
        if file is not None:
            return file.parents[name.count("/")]
    raise MissingFileError(
        f"{repo}@{revision[:8]} has none of the files {', '.join(sorted(filenames)[:3])}",
        next_step="correct the manifest",
    )


def download_from_dataset(repo: str, revision: str, *, filename: str) -> Path:
    """One file of a dataset repository at a full commit id, in huggingface_hub's cache.

    Raises:
        MissingFileError: it has no such file.
        HubError: it could not be had.
    """
    _plain(filename, THE_HUB)
    with _explained(repo, revision, filename=filename):
        return Path(THE_HUB.api.hf_hub_download(repo, filename, revision=revision, repo_type="dataset"))


def header_of(repo: str, revision: str, *, filename: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every tensor of a remote safetensors file, read by range requests, not by download."""
    with _explained(repo, revision, filename=filename):
        metadata = HfApi().parse_safetensors_file_metadata(repo, filename, revision=revision)
        return {name: (str(info.dtype), tuple(map(int, info.shape))) for name, info in metadata.tensors.items()}


def stream(
    repo: str, revision: str, *, filename: str, start: int, stop: int, at: Destination = THE_HUB
) -> Iterator[bytes]:
    """The file's bytes from `start` up to `stop`, in pieces as they arrive; nothing is stored.

    A connection that breaks is taken up again at the byte where it broke; a Hub that answers 429 or 5xx is asked
    again when it says, or after a while.

    Raises:
        MissingFileError: the repository has no such file.
        UnclearAnswerError: it went on breaking.
        HubError: it was refused, or the Hub does not send parts of files.
    """
    url = hf_hub_url(repo, filename, revision=revision, endpoint=at.endpoint)
    with _explained(repo, revision, at=at):
        fruitless = 0
        while start < stop:
            fruitless += 1
            try:
                for piece in _range(url, start, stop=stop, token=at.token):
                    start += len(piece)
                    fruitless = 0
                    yield piece
            except Exception as error:
                if fruitless > _PATIENCE or not _on_the_way(error):
                    raise
            if fruitless > _PATIENCE:
                raise TimeoutError
            if start < stop:
                time.sleep(min(_FIRST_WAIT * 2**fruitless, _LONGEST_WAIT))


def _range(url: str, start: int, *, stop: int, token: str | None) -> Iterator[bytes]:
    """One answer to one request."""
    headers = build_hf_headers(token=token) | {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    # the client's own repetition would not know where the last answer broke
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout, retry_on_exceptions=()) as response:
        hf_raise_for_status(response)
        place = response.headers.get("Content-Range", "")
        if response.status_code != _PARTIAL or not place.startswith(f"bytes {start}-"):
            raise HubError(
                f"{url} was asked for bytes {start}-{stop - 1} and answered with {place or 'the whole file'}",
                next_step="run the same command without --stream",
            )
        yield from response.iter_bytes()


def is_public(repo: str, revision: str) -> bool:
    """Whether anyone can see the repository at this revision, without a token."""
    try:
        with _explained(repo, revision):
            HfApi().model_info(repo, revision=revision, token=False)
    except MissingRepositoryError:
        return False
    return True


# --- writing ------------------------------------------------------------------------------------------------


def account(at: Destination = THE_HUB) -> Account | None:
    """Whose token is used; None with trusted publishing, whose token belongs to a repository and not to a person.

    Raises:
        HubError: no token, or one that the Hub does not accept.
    """
    with _explained("this account", "", at=at):
        if at.token is None and os.environ.get(_OIDC):
            get_token()
            return None
        if at.token is None and get_token() is None:
            raise HubError("there is no Hub token on this machine", next_step="hf auth login, or set HF_TOKEN")
        answer = at.api.whoami()
        role = answer.get("auth", {}).get("accessToken", {}).get("role")
        names = (answer["name"], *(organisation["name"] for organisation in answer.get("orgs", ())))
    return Account(tuple(_word(name, at) for name in names), read_only=role == "read")


def require_write(repo: str, *, at: Destination = THE_HUB) -> None:
    """Ask the Hub whether this token may write to the repository; nothing is written.

    Raises:
        HubError: it may not.
    """
    with _explained(repo, "", at=at):
        at.api.auth_check(repo, write=True)


def current_token() -> str | None:
    """The token huggingface_hub uses, for handing to another process of this tool; never to be shown."""
    return get_token()


def trusted_repository() -> str | None:
    """The repository that trusted publishing is set up for in this environment, if it is."""
    return os.environ.get(_OIDC)


def create_repository(repo: str, *, at: Destination = THE_HUB) -> None:
    """Create a public model repository; one that is there already is fine."""
    with _explained(repo, "", at=at):
        at.api.create_repo(repo, exist_ok=True)


def commit(
    repo: str,
    *,
    changes: Mapping[str, Path | None],
    message: str,
    parent: str,
    pull_request: bool,
    at: Destination = THE_HUB,
    told: Callable[[str], None] = lambda _path: None,
) -> NewCommit:
    """Everything in one commit on top of `parent`, or as a pull request; a path without a file is deleted.

    Large files go ahead one by one, and `told` of each.

    Raises:
        StaleParentError: the branch is no longer at `parent`; nothing was written.
        UnclearAnswerError: it may have landed or not.
        HubError: it was refused; nothing was written.
    """
    operations = [
        CommitOperationDelete(path_in_repo=path) if file is None else CommitOperationAdd(path, file)
        for path, file in changes.items()
    ]
    with _explained(repo, parent, at=at):
        for operation in operations:
            if isinstance(operation, CommitOperationAdd) and operation.upload_info.size >= _LARGE:
                told(operation.path_in_repo)
                at.api.preupload_lfs_files(repo, [operation], create_pr=pull_request)
        made = at.api.create_commit(
            repo, operations, commit_message=message, parent_commit=parent, create_pr=pull_request
        )
    return _new_commit(made.oid, made.pr_url or made.commit_url, at=at)


def tags(repo: str, *, at: Destination = THE_HUB) -> dict[str, str]:
    """Each tag and the commit it points to."""
    with _explained(repo, "", at=at):
        found = at.api.list_repo_refs(repo).tags
    return {_word(ref.name, at): _commit_id(ref.target_commit, at) for ref in found}


def commits_since(repo: str, commit: str, *, branch: str, at: Destination = THE_HUB) -> tuple[str, ...]:
    """The commits that the branch has gained since `commit`, oldest first."""
    with _explained(repo, branch, at=at):
        newest_first = [_commit_id(entry.commit_id, at) for entry in at.api.list_repo_commits(repo, revision=branch)]
    return tuple(takewhile(lambda found: found != commit, newest_first))[::-1]


def pull_requests(repo: str, *, at: Destination = THE_HUB) -> dict[int, str]:
    """Each pull request's number, closed ones included, and the commit it is at; the newest comes first."""
    with _explained(repo, "", at=at):
        refs = at.api.list_repo_refs(repo, include_pull_requests=True)
    commits = {_number(ref.ref, at): _commit_id(ref.target_commit, at) for ref in refs.pull_requests or ()}
    return dict(sorted(commits.items(), reverse=True))


def is_open(repo: str, pull_request: int, *, at: Destination = THE_HUB) -> bool:
    """Whether a pull request waits to be merged."""
    with _explained(repo, "", at=at):
        return at.api.get_discussion_details(repo, pull_request).status in _WAITING


def create_tag(repo: str, tag: str, *, revision: str, at: Destination = THE_HUB) -> None:
    """Tag a commit.

    Raises:
        UnclearAnswerError: the tag may be there or not, perhaps made by somebody else at this moment.
    """
    with _explained(repo, revision, at=at):
        at.api.create_tag(repo, tag=tag, revision=revision)


# --- explaining ---------------------------------------------------------------------------------------------


@contextmanager
def _explained(repo: str, revision: str, *, filename: str = "", at: Destination = THE_HUB) -> Iterator[None]:
    """Turn the client's exceptions into one sentence with what to do."""
    try:
        with hubdoor.asking(at.address):
            yield
    except PublisherError:
        raise
    except Exception as raised:
        error = _inner(raised)
        if isinstance(error, PublisherError):
            raise error from raised
        if isinstance(error, UnicodeEncodeError):  # of a header: it quotes the token, and is told without it
            raise explained(error) from None
        explanation = (
            _absence(error, repo, revision=revision, filename=filename, at=at)
            or _failure(error, repo, at=at)
            or _unread(error, at)
            or _unread(raised, at)
        )
        if explanation is None:
            raise
        # what a client refuses to send, it quotes: the token would stand in the traceback
        raise explanation from (None if type(error).__name__ == _UNSENDABLE else error)


def _inner(error: Exception) -> Exception:
    """What went wrong with an upload, which the client wraps in an error of no kind."""
    wrapped = type(error) is RuntimeError and isinstance(error.__cause__, Exception)
    return error.__cause__ if wrapped and isinstance(error.__cause__, Exception) else error


def _absence(error: Exception, repo: str, *, revision: str, filename: str, at: Destination) -> HubError | None:
    """What is not there, or not for this token."""
    if isinstance(error, GatedRepoError):
        return HubError(f"{repo} is gated", next_step=f"ask for access at {at.address}/{repo}, then: hf auth login")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return MissingRepositoryError(
            f"there is no repository {repo} at {at.address}, or this token may not see it",
            next_step="correct the manifest, or: hf auth login",
        )
    if isinstance(error, RevisionNotFoundError):
        return MissingRevisionError(
            f"{repo} has no revision {revision}", next_step="correct the pin, or: publish pin MANIFEST"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        what = f" has no file {filename}" if filename else f": {_first_line(error)}"
        return MissingFileError(f"{repo}@{revision[:8]}{what}", next_step="correct the manifest")
    return None


def _failure(error: Exception, repo: str, *, at: Destination) -> HubError | None:
    """What went wrong on the way, or was refused."""
    if isinstance(error, OIDCError) or _refuses_exchange(error):
        return HubError(
            f"trusted publishing was refused: {_reason(error)}",
            next_step="compare the trusted publisher's claims on the Hub with this workflow (docs/releasing.md)",
        )
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, repo, at=at)
    if type(error).__name__ == _UNSENDABLE:
        return HubError(
            "the Hub token holds a character that cannot be sent",
            expected="letters, digits and '_'",
            next_step="hf auth login, or set HF_TOKEN anew",
        )
    if isinstance(error, ValueError) and str(error).startswith("Invalid metadata in README.md"):
        complaints = for_terminal(" ".join(str(error).split("\n")[1:]))[:_SAID]
        return HubError(f"{at.label} does not accept the metadata of README.md: {complaints}", next_step=_CARD)
    if _on_the_way(error) or isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return _unreachable(error, at)
    return None


def _unread(error: Exception, at: Destination) -> HubError | None:
    """An answer that is not what the client expects: of another shape, too deep, or not of the stated length."""
    if not isinstance(error, _UNREADABLE) and not (isinstance(error, OSError) and error.errno is None):
        return None
    return UnclearAnswerError(
        f"{at.label} gave an answer that the client cannot read ({type(error).__name__}: {_reason(error)})",
        expected="what the Hub answers",
        next_step="check HF_ENDPOINT and the connection, then run the same command again",
    )


def _on_the_way(error: Exception) -> bool:
    """Whether the connection failed, rather than the Hub's answer said so."""
    transport = type(error).__module__.partition(".")[0] in _TRANSPORT
    return transport or isinstance(error, ConnectionError | TimeoutError)


def _refuses_exchange(error: Exception) -> bool:
    """Whether GitHub gave no ID token, or the Hub no token for it; a Hub that is out of order has not refused."""
    if not isinstance(error, HfHubHTTPError) or error.response.status_code in _PASSING:
        return False
    issuer = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_URL", "").partition("?")[0]
    url = error.response.url.copy_with(query=None)
    return url.path == _EXCHANGE or str(url) == issuer


def _refusal(error: HfHubHTTPError, repo: str, *, at: Destination) -> HubError:
    status = error.response.status_code
    if status == _UNAUTHORIZED:
        again = "run the job again" if at.token is None and trusted_repository() else "hf auth login"
        return HubError(f"{at.label} does not accept this token, or it has expired", next_step=again)
    if status == _FORBIDDEN:
        return HubError(
            f"this token may not write to {repo}",
            next_step=f"use a token with write access to {repo.partition('/')[0]}",
        )
    if status == _STALE:
        return StaleParentError(f"{repo} has moved on", next_step="run the same command again")
    if status == _CONFLICT or status in _PASSING:
        return UnclearAnswerError(f"{at.label} answered {status}", next_step="run the same command again")
    return HubError(f"{at.label} refused a request about {repo}: {_reason(error)}")


def _unreachable(error: BaseException, at: Destination) -> UnclearAnswerError:
    return UnclearAnswerError(
        f"the Hub at {at.address} cannot be reached ({type(error).__name__})",
        next_step="check the connection and HF_ENDPOINT, or give local checkpoint folders as path: in the manifest",
    )


def _reason(error: Exception) -> str:
    """The first line of what the Hub said, else of the exception, as a message may repeat it."""
    said = error.server_message if isinstance(error, HfHubHTTPError) else None
    return for_terminal(said.splitlines()[0])[:_SAID] if said else _first_line(error)


def _first_line(error: BaseException) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return for_terminal(line)[:_SAID]


# --- what an answer says ------------------------------------------------------------------------------------


def _remote_file(entry: RepoFile, at: Destination) -> RemoteFile:
    """One entry of a listing, whose every field is of the server's making."""
    size, digest = entry.size, entry.lfs.sha256 if entry.lfs else None
    if type(size) is not int or not 0 <= size <= LIMITS.file_bytes:
        raise _foreign(at, f"lists a file of {_shown(size)} bytes", expected=f"0 to {LIMITS.file_bytes:,}")
    if digest is not None and not _is(digest, _DIGEST):
        raise _foreign(at, f"lists a file with the SHA-256 {_shown(digest)}", expected="64 hex digits")
    if not _is(entry.blob_id, _COMMIT_ID) and not _is(entry.blob_id, _DIGEST):
        raise _foreign(at, f"lists a file with the git id {_shown(entry.blob_id)}", expected="40 or 64 hex digits")
    return RemoteFile(_plain(entry.path, at), size, entry.blob_id, digest)


def _plain(path: object, at: Destination) -> str:
    """A name of a file that stays inside its repository, and inside the cache."""
    try:
        if not isinstance(path, str):
            raise ValueError("it is no text")  # noqa: TRY004, TRY301 - one fault among those of a path
        return repository_path(path)
    except ValueError as error:
        raise _foreign(at, f"names the file {_shown(path)}: {error}", expected="a plain relative path") from None


def _commit_id(value: object, at: Destination) -> str:
    if not isinstance(value, str) or not _COMMIT_ID.fullmatch(value):
        raise _foreign(at, f"names the commit {_shown(value)}", expected="40 hex digits")
    return value


def _new_commit(made: object, url: object, *, at: Destination) -> NewCommit:
    try:
        return NewCommit(_commit_id(made, at), _word(url, at))
    except HubError as error:  # it may have landed all the same
        raise UnclearAnswerError(error.found, expected=error.expected, next_step=error.next_step) from None


def _word(value: object, at: Destination) -> str:
    """A name or an address, which is shown to people as it is."""
    if not isinstance(value, str) or len(value) > LIMITS.path_characters or for_terminal(value) != value:
        raise _foreign(at, f"answers with {_shown(value)}", expected="one line of printable text")
    return value


def _number(ref: object, at: Destination) -> int:
    found = _PULL_REQUEST.fullmatch(ref) if isinstance(ref, str) else None
    if found is None:
        raise _foreign(at, f"lists the pull request {_shown(ref)}", expected="refs/pr/ and a number")
    return int(found[1])


def _is(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(pattern.fullmatch(value))


def _shown(value: object) -> str:
    text = value[:_SAID] if isinstance(value, str) else repr(value)[:_SAID]
    return for_terminal(text) or "''"


def _foreign(at: Destination, found: str, *, expected: str) -> HubError:
    return HubError(f"{at.label} {found}", expected=expected, next_step="check HF_ENDPOINT, and the repository there")
