"""Every failure of a Hub, or on the way to it, as one `HubError` that says what to do next.

Whatever asks a Hub does so inside `explained`. Neither a token nor a header ever enters a message.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

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

from publisher.border import causes
from publisher.border.escape import for_terminal
from publisher.errors import (
    HubError,
    MissingFileError,
    MissingRepositoryError,
    MissingRevisionError,
    PublisherError,
    StaleParentError,
    UnclearAnswerError,
)
from publisher.hub import door
from publisher.hub.answers import SAID
from publisher.hub.destination import THE_HUB, Destination

OIDC_RESOURCE = "HF_OIDC_RESOURCE"  # the repository that trusted publishing is set up for
_UNAUTHORIZED, _FORBIDDEN, _CONFLICT, _STALE = 401, 403, 409, 412
_PASSING = frozenset({408, 429, *range(500, 600)})  # the same request may well succeed a little later
_EXCHANGE = "/oauth/token"
_CARD = "correct the manifest or the card's template, then: publish card --manifest MANIFEST"
_UNSENDABLE = "LocalProtocolError"  # of httpx, under either name
_TRANSPORT = frozenset({"httpx", "httpcore", "httpx2", "httpcore2"})  # the client's, under either name
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, AssertionError)  # RuntimeError: hf_xet


@contextmanager
def explained(repo: str, revision: str, *, filename: str = "", at: Destination = THE_HUB) -> Iterator[None]:
    """Turn the client's exceptions into one sentence with what to do.

    Args:
        repo: the repository that is asked about; any other subject where there is none.
        revision: branch, tag or commit that is asked about; may be empty.
        filename: the file that is asked for, where it is one.
        at: the Hub that is asked.

    Yields:
        Nothing; the block asks the Hub.

    Raises:
        HubError: it failed; of the subclass that tells how.
    """
    try:
        with door.asking(at.address):
            yield
    except PublisherError:
        raise
    except Exception as raised:
        error = _inner(raised)
        if isinstance(error, PublisherError):
            raise error from raised
        if isinstance(error, UnicodeEncodeError):  # of a header: it quotes the token, and is told without it
            raise causes.explained(error) from None
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


def is_on_the_way(error: Exception) -> bool:
    """Return whether the connection failed, rather than the Hub's answer said so."""
    transport = type(error).__module__.partition(".")[0] in _TRANSPORT
    return transport or isinstance(error, ConnectionError | TimeoutError)


def _inner(error: Exception) -> Exception:
    """Return what went wrong with an upload, which the client wraps in a plain RuntimeError."""
    cause = error.__cause__
    return cause if type(error) is RuntimeError and isinstance(cause, Exception) else error


def _absence(error: Exception, repo: str, *, revision: str, filename: str, at: Destination) -> HubError | None:
    """Return the error for what is not there, or not for this token."""
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
        what = f" has no file {filename}" if filename else f": {_shown(causes.first_line(error))}"
        return MissingFileError(f"{repo}@{revision[:8]}{what}", next_step="correct the manifest")
    return None


def _failure(error: Exception, repo: str, *, at: Destination) -> HubError | None:
    """Return the error for what went wrong on the way, or was refused."""
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
        complaints = for_terminal(" ".join(str(error).split("\n")[1:]))[:SAID]
        return HubError(f"{at.label} does not accept the metadata of README.md: {complaints}", next_step=_CARD)
    if is_on_the_way(error) or isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return UnclearAnswerError(
            f"the Hub at {at.address} cannot be reached ({type(error).__name__})",
            next_step="check the connection and HF_ENDPOINT, or give local checkpoint folders as path: in the manifest",
        )
    return None


def _unread(error: Exception, at: Destination) -> HubError | None:
    """Return the error for an answer that the client cannot read: of another shape, too deep, or of another length."""
    if not isinstance(error, _UNREADABLE) and not (isinstance(error, OSError) and error.errno is None):
        return None
    return UnclearAnswerError(
        f"{at.label} gave an answer that the client cannot read ({type(error).__name__}: {_reason(error)})",
        expected="what the Hub answers",
        next_step="check HF_ENDPOINT and the connection, then run the same command again",
    )


def _refuses_exchange(error: Exception) -> bool:
    """Return whether GitHub gave no ID token, or the Hub no token for it; a Hub out of order has not refused."""
    if not isinstance(error, HfHubHTTPError) or error.response.status_code in _PASSING:
        return False
    issuer = os.environ.get("ACTIONS_ID_TOKEN_REQUEST_URL", "").partition("?")[0]
    url = error.response.url.copy_with(query=None)
    return url.path == _EXCHANGE or str(url) == issuer


def _refusal(error: HfHubHTTPError, repo: str, *, at: Destination) -> HubError:
    status = error.response.status_code
    if status == _UNAUTHORIZED:
        again = "run the job again" if at.token is None and os.environ.get(OIDC_RESOURCE) else "hf auth login"
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


def _reason(error: Exception) -> str:
    """Return the first line of what the Hub said, else of the exception, as a message may repeat it."""
    said = error.server_message if isinstance(error, HfHubHTTPError) else None
    return _shown(said.splitlines()[0] if said else causes.first_line(error))


def _shown(line: str) -> str:
    return for_terminal(line)[:SAID]
