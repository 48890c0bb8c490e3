"""How the local Hub says no: the status and the error code from which the client chooses its exception.

Every message names the local Hub, except the one that the client compares word for word. No message repeats a token.
"""

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import JSONResponse

from publisher.border.escape import for_terminal


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault of the program
    """An answer other than 2xx; `code` becomes X-Error-Code, `body` and `headers` join the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str = "",
        body: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        message = for_terminal(message)
        self.status = status
        self.message = message
        self.body = {"error": message, **(body or {})}
        printable = " ".join(message.split()).encode("ascii", "replace").decode()
        self.headers = {"X-Error-Message": printable, **({"X-Error-Code": code} if code else {}), **(headers or {})}


async def answer_refusal(_: Request, refusal: Exception) -> JSONResponse:
    """Send a refusal (a Starlette exception handler)."""
    if not isinstance(refusal, Refusal):
        raise refusal
    return refused(refusal)


def refused(refusal: Refusal) -> JSONResponse:
    """Return the answer that a refusal is."""
    return JSONResponse(refusal.body, refusal.status, headers=refusal.headers)


def bad_request(what: str) -> Refusal:
    """Return 400: the request itself is malformed."""
    return Refusal(400, f"local Hub: {what}")


def too_large(limit: int) -> Refusal:
    """Return 413: the body of a request exceeds what is accepted at this address."""
    return Refusal(413, f"local Hub: the body is larger than {limit} bytes, which is the most that is accepted here")


def misdirected() -> Refusal:
    """Return 421: the request names another host, as a web page does whose name leads to this machine."""
    return Refusal(421, "local Hub: it answers to 127.0.0.1 and localhost with its own port only")


def foreign_origin() -> Refusal:
    """Return 403: a web page of another site wants to change something here."""
    return Refusal(403, "local Hub: it changes nothing for pages of other sites")


def bad_path(why: str) -> Refusal:
    """Return 422: a path that cannot be committed."""
    return Refusal(422, f"local Hub: the path cannot be committed: {why}")


def bad_token() -> Refusal:
    """Return 401: a token that is unknown or has expired. The client knows this text and shows it as it is."""
    return Refusal(401, "Invalid credentials in Authorization header")


def token_needed() -> Refusal:
    """Return 401: there is no token.

    The client reads any other 401 about a repository as "not found, or you may not see it".
    """
    return Refusal(401, "local Hub: a token is needed for this")


def forbidden(why: str) -> Refusal:
    """Return 403: a good token that may not do this."""
    return Refusal(403, f"local Hub: {why}")


def repository_not_found() -> Refusal:
    """Return 404, which the client reads as RepositoryNotFoundError."""
    return Refusal(404, "local Hub: there is no such repository", code="RepoNotFound")


def revision_not_found(revision: str) -> Refusal:
    """Return 404, which the client reads as RevisionNotFoundError."""
    return Refusal(404, f"local Hub: Invalid rev id: {revision}", code="RevisionNotFound")


def entry_not_found(path: str, *, revision: str = "") -> Refusal:
    """Return 404, which the client reads as EntryNotFoundError; it remembers the absence if it learns the commit."""
    headers = {"X-Repo-Commit": revision} if revision else None
    return Refusal(404, f"local Hub: there is no entry {path}", code="EntryNotFound", headers=headers)


def exists_already(what: str, *, url: str = "") -> Refusal:
    """Return 409; the client's exist_ok needs the `url` of a repository that exists."""
    return Refusal(409, f"local Hub: {what} already exists", body={"url": url} if url else None)


def stale_parent() -> Refusal:
    """Return 412: the branch has moved on since the caller looked."""
    return Refusal(412, "local Hub: the branch was updated after the parent commit that was named")
