"""Who may speak to a local Hub at all: programs on this machine, and no web page of another site.

A page whose name is made to lead to 127.0.0.1 (DNS rebinding) still sends its own name as Host, and a page that posts
here without leave sends its own as Origin.
"""

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from publisher.hub.local.refusals import Refusal, bad_request, foreign_origin, misdirected, refused

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """Refuses a request by its Host, its Origin or an unreadable address, before anything else sees it."""

    def __init__(self, app: ASGIApp, endpoint: str) -> None:
        self._app = app
        port = urlsplit(endpoint).port
        self._hosts = frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if refusal := self._refusal(scope):
            await refused(refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        if not scope["path"].isascii():
            return bad_request("the address holds characters that are not percent-encoded")
        if self._sent(scope, b"host") not in self._hosts:
            return misdirected()
        origin = self._sent(scope, b"origin")
        if scope["method"] not in _READING and origin is not None and origin.removeprefix("http://") not in self._hosts:
            return foreign_origin()
        return None

    @staticmethod
    def _sent(scope: Scope, header: bytes) -> str | None:
        """Return the header's value in small letters; none if it is not there, and no possible one if it is twice."""
        values = [value for name, value in scope["headers"] if name.lower() == header]
        return b" ".join(values).decode("latin-1").lower() if values else None
