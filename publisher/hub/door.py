"""The HTTP client that huggingface_hub works with in this tool: where a token may go, and what may come back.

A server's answers are foreign. Before huggingface_hub sees one, its headers are checked (they become names of files in
the cache), its links and redirects are, and its body ends at a bound. Offline mode holds for every Hub but an embedded
one, which is on this machine. Begin reading with `install`.
"""

import contextlib
import ipaddress
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from huggingface_hub import close_session, constants, get_session, set_client_factory

from publisher.border.escape import for_terminal
from publisher.border.limits import LIMITS
from publisher.errors import HubError

try:
    import httpx2 as httpx
except ModuleNotFoundError:  # huggingface_hub below 2 works with its predecessor
    import httpx  # type: ignore[no-redef, import-not-found, unused-ignore]

_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_TAG: Final = re.compile(r'(?:W/)?"?[0-9A-Za-z][0-9A-Za-z._-]{0,127}"?')
_NUMBER: Final = re.compile(r"[0-9]{1,14}")
_RANGE: Final = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})")
_PINNED: Final = re.compile(r"/resolve/([0-9a-f]{40})/")
_NAMING: Final = {  # what huggingface_hub takes from the answer to a HEAD, and makes names in its cache of
    "x-repo-commit": (_COMMIT, "a commit id of 40 hex digits"),
    "etag": (_TAG, "a plain tag, which names a file in the cache"),
    "x-linked-etag": (_TAG, "a plain tag, which names a file in the cache"),
    "x-xet-hash": (_HEX, "64 hex digits"),
    "x-linked-size": (_NUMBER, "a number of bytes"),
}
_ALWAYS: Final = {"content-length": (_NUMBER, "a number of bytes")}
_ISSUER: Final = "ACTIONS_ID_TOKEN_REQUEST_URL"
_NO_PROXY: Final = ("NO_PROXY", "no_proxy")
_HERE: Final = ("127.0.0.1", "localhost")
_SHOWN: Final = 200  # characters of a server's text in a message
_DOWNLOAD, _ANSWER = "download", "answer"
_PURPOSE: Final = "publisher.purpose"  # among the extensions of a request, which a redirect takes along
_PLAIN: Final = frozenset({"", "identity"})


@dataclass(slots=True)
class Question:
    """What this tool is asking of a server right now: how much has come back for it, and which pages of a list."""

    octets: int = 0
    pages: set[str] = field(default_factory=set)


_question: ContextVar[Question | None] = ContextVar("_question", default=None)
_trusted: set[str] = set()  # origins that this tool was told to speak to
_asked: list[str] = []  # the endpoints of the questions that are open, in any thread
_embedded: set[str] = set()  # origins of the local Hubs that this very process runs


def install() -> None:
    """Give huggingface_hub this client from now on; the hooks of the client that it had so far stay in use."""
    usual = get_session().event_hooks["request"]  # they hold offline mode, and number the requests
    set_client_factory(lambda: _client(usual))


@contextlib.contextmanager
def asking(endpoint: str) -> Iterator[None]:
    """Ask something of the Hub at this endpoint, which may be sent the token; the bounds are counted from here.

    Where a token may go is checked during such a block alone: others in this process may speak to Hubs of their own.
    """
    _trusted.add(_origin(endpoint))
    _question.set(Question())
    _asked.append(endpoint)
    try:
        yield
    finally:
        _asked.remove(endpoint)


@contextlib.contextmanager
def embedded(endpoint: str) -> Iterator[None]:
    """Open the door to a Hub that this process runs during the block, offline or not, and past any proxy."""
    before = {name: os.environ.get(name) for name in _NO_PROXY}
    origin = _origin(endpoint)
    _embedded.add(origin)
    for name in _NO_PROXY:  # hf_xet reads them too
        os.environ[name] = ",".join(filter(None, (before[name], *_HERE)))
    close_session()  # the proxies are read when a session begins
    try:
        yield
    finally:
        _embedded.discard(origin)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        close_session()


def _client(usual: Sequence[Callable[[httpx.Request], object]]) -> httpx.Client:
    def departing(request: httpx.Request) -> None:
        if _origin(str(request.url)) not in _same_machine():
            for hook in usual:
                hook(request)
        _before(request)

    hooks: dict[str, list[Callable[..., Any]]] = {"request": [departing], "response": [_after]}
    return httpx.Client(event_hooks=hooks, follow_redirects=True, timeout=LIMITS.answer_seconds)


def _before(request: httpx.Request) -> None:
    """Check a request before it is sent: where its token goes, and how long an answer may take."""
    request.extensions.setdefault(_PURPOSE, _purpose(request))
    origin = _origin(str(request.url))
    if _asked and "authorization" in request.headers and origin not in _receivers():
        if request.extensions[_PURPOSE] != _DOWNLOAD:
            raise _refused(request, "would be sent the token", "an address of the Hub itself")
        del request.headers["authorization"]  # where a mirror leads to another host, which needs none
    request.headers["Accept-Encoding"] = "identity"  # a compressed body could become any size
    timeout = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {
        kind: timeout.get(kind) or LIMITS.answer_seconds for kind in ("connect", "read", "write", "pool")
    }


def _after(response: httpx.Response) -> None:
    """Check an answer before anything of its body is read."""
    request = response.request
    _require_headers(response)
    _require_links(response)
    if response.has_redirect_location:
        _require_redirect(response)
    encoding = response.headers.get("content-encoding", "").lower()
    if encoding not in _PLAIN:
        raise _refused(request, f"sent a body encoded as {_shown(encoding)}", "a plain one, as was asked for")
    response.stream = _Bounded(response)


class _Bounded(httpx.SyncByteStream):
    """The body of an answer up to its bound."""

    def __init__(self, response: httpx.Response) -> None:
        self._inner: Any = response.stream
        self._request = response.request
        self._download = response.request.extensions[_PURPOSE] == _DOWNLOAD and response.is_success
        self._limit = _limit(response, download=self._download)
        self._question = None if self._download else _question.get()
        stated = int(response.headers.get("content-length", 0))
        if not self._download and response.request.method != "HEAD" and stated > self._limit:
            raise self._too_much(f"announced {stated:,} bytes")

    def __iter__(self) -> Iterator[bytes]:
        count, begun = 0, time.monotonic()
        for piece in self._inner:
            count += len(piece)
            if count > self._limit:
                raise self._too_much("sent more bytes than that")
            if not self._download and time.monotonic() - begun > LIMITS.answer_seconds:
                raise _refused(self._request, f"took more than {LIMITS.answer_seconds} s for one answer", "an end")
            if self._question is not None:
                self._question.octets += len(piece)
                if self._question.octets > LIMITS.json_bytes:
                    raise self._too_much(f"sent {self._question.octets:,} bytes in all")
            yield piece

    def close(self) -> None:
        self._inner.close()

    def _too_much(self, found: str) -> HubError:
        return _refused(self._request, found, f"at most {self._limit:,} bytes")


def _limit(response: httpx.Response, *, download: bool) -> int:
    if not download:
        return LIMITS.answer_bytes
    if wanted := _RANGE.fullmatch(response.request.headers.get("range", "")):
        return int(wanted[2]) - int(wanted[1]) + 1
    return LIMITS.file_bytes if "content-length" in response.headers else LIMITS.unsized_bytes


def _purpose(request: httpx.Request) -> str:
    """Return whether a file is asked for, which may be of any size, or a short answer."""
    path, origin = request.url.path, _origin(str(request.url))
    api = path.startswith("/api/") and not path.startswith("/api/resolve-cache/")
    issuer = origin == _origin(os.environ.get(_ISSUER, "")) and not _PINNED.search(path)
    return _DOWNLOAD if request.method in {"GET", "HEAD"} and not api and not issuer else _ANSWER


def _require_headers(response: httpx.Response) -> None:
    checked = _ALWAYS | (_NAMING if response.request.method == "HEAD" else {})
    for name, (pattern, expected) in checked.items():
        value = response.headers.get(name)
        if value is not None and not pattern.fullmatch(value):
            raise _refused(response.request, f"sent the header {name}: {_shown(value)}", expected)
    pinned = _PINNED.search(response.request.url.path)
    commit = response.headers.get("x-repo-commit")
    if pinned and commit and commit != pinned[1]:
        raise _refused(response.request, f"answered with commit {commit}", f"commit {pinned[1]}")


def _require_links(response: httpx.Response) -> None:
    """Refuse links that would take the token elsewhere, or never end."""
    if not _asked:
        return
    links = {name: link.get("url", "") for name, link in response.links.items()}
    renewal = response.headers.get("x-xet-refresh-route", links.get("xet-auth", ""))
    for link in filter(None, (renewal, links.get("next"))):
        if _origin(link) not in {*_receivers(), _origin(constants.HUGGINGFACE_CO_URL_HOME) if link is renewal else ""}:
            raise _refused(response.request, f"leads on to {_shown(link)}", "an address of the Hub itself")
    following, question = links.get("next"), _question.get()
    if following and question:
        if following in question.pages or following == str(response.request.url):
            raise _refused(response.request, f"leads in a circle to {_shown(following)}", "a list that ends")
        question.pages.add(following)
        if len(question.pages) > LIMITS.answer_pages:
            raise _refused(response.request, "gives a list in ever more pages", f"at most {LIMITS.answer_pages} pages")


def _require_redirect(response: httpx.Response) -> None:
    """Refuse to be led away from the web, from an encrypted connection, or from outside to this machine's network."""
    source, location = response.request.url, response.headers.get("location", "")
    target = urlsplit(str(source.join(location)) if _is_address(location) else "")
    safe = target.scheme == "https" or (target.scheme == "http" and source.scheme == "http")
    if not safe or not target.hostname or (_is_inside(target.hostname) and not _is_inside(source.host)):
        raise _refused(
            response.request, f"leads on to {_shown(location)}", "an address on the web, encrypted as before"
        )


def _is_address(location: str) -> bool:
    try:
        return urlsplit(location).port != 0 and bool(httpx.URL(location))
    except (ValueError, httpx.InvalidURL):
        return False


def _is_inside(host: str) -> bool:
    """Return whether a host is this machine or its own network, as far as its name tells."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.lower().rstrip(".") == "localhost" or host.lower().rstrip(".").endswith(".localhost")
    return not address.is_global


def _same_machine() -> set[str]:
    """Return the origins of the embedded Hubs, under the name of their storage too."""
    return _embedded | {origin.replace(*_HERE) for origin in _embedded}


def _receivers() -> set[str]:
    """Return the origins that may be sent a token; the issuer of a CI job's ID token has one of its own."""
    return {_origin(constants.ENDPOINT), _origin(os.environ.get(_ISSUER, "")), *_trusted} - {""}


def _origin(address: str) -> str:
    """Return scheme, host and port of an address; nothing where it has none."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else ""


def _refused(request: httpx.Request, found: str, expected: str) -> HubError:
    return HubError(
        f"the server at {_shown(_origin(str(request.url)))} {found}, in answer to {request.method} "
        f"{_shown(request.url.path)}",
        expected=expected,
        next_step="check HF_ENDPOINT and the connection: this is not how the Hub answers",
    )


def _shown(text: str) -> str:
    """Return a server's text as a message may repeat it."""
    return for_terminal(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
