"""The ASGI application: every address of the local Hub, how it is read, and what is noted of each request."""

import logging
from collections import deque
from typing import ClassVar
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from publisher.border.escape import for_terminal
from publisher.hub.local.context import Context
from publisher.hub.local.guard import Guard
from publisher.hub.local.refusals import Refusal, answer_refusal

_NOTES = 100_000  # requests that are remembered
_NOTED = 1_000  # characters of a path in such a note
_log = logging.getLogger("publisher.hub.local")


class _Quoted(Convertor[str]):
    """One segment of a path, percent-encoded: the client writes a revision as refs%2Fpr%2F1."""

    regex: ClassVar[str] = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return value


class _QuotedPath(_Quoted):
    """All the segments that are left."""

    regex: ClassVar[str] = ".+"


class _Kind(_Quoted):
    """The sort of repository, as the API's paths name it."""

    regex: ClassVar[str] = "models|datasets|spaces"


class _SmallNumber(Convertor[int]):
    """A number that counts parts or pull requests."""

    regex: ClassVar[str] = "[1-9][0-9]{0,5}"

    def convert(self, value: str) -> int:
        return int(value)

    def to_string(self, value: int) -> str:
        return str(value)


register_url_convertor("quoted", _Quoted())
register_url_convertor("number", _SmallNumber())
register_url_convertor("quoted_path", _QuotedPath())
register_url_convertor("kind", _Kind())


def routes() -> list[Route]:
    """Return every address, in the order in which they are tried."""
    from publisher.hub.local.routes import accounts, commits, files, lfs, refs, repos, xet

    parts = (accounts, lfs, xet, commits, refs, files, repos)
    return [route for part in parts for route in part.ROUTES]


def application(context: Context) -> ASGIApp:
    """Return the ASGI application of the local Hub with this context."""
    handlers = {Refusal: answer_refusal, ClientDisconnect: _answer_nobody}
    app = Starlette(routes=routes(), exception_handlers=handlers)
    app.state.context = context
    return Guard(app, context.endpoint)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """Send an answer that nobody reads, to a caller who has hung up before the end of the request."""
    return Response(status_code=400)


class Journal:
    """Routes on the path as it was sent, notes method, path and status of each request, and counts what it sends.

    Neither headers, queries nor bodies are noted: they are where tokens travel.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.lines: deque[str] = deque(maxlen=_NOTES)
        self.bytes_sent = 0
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and note it."""
        scope["path"] = scope["raw_path"].decode("latin-1")
        answered = False

        async def noting(message: Message) -> None:
            nonlocal answered
            if not answered:  # before the client can know of the answer, so that a test finds the note
                self._note(scope, str(message["status"]))
                answered = True
            self.bytes_sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:  # noqa: BLE001 - whatever it is, it is logged whole
            # Starlette has answered 500. Told of the error, uvicorn would close a connection still in use.
            _log.exception("the local Hub has failed")
        if not answered:
            self._note(scope, "no answer")

    def _note(self, scope: Scope, outcome: str) -> None:
        line = f"{for_terminal(scope['method'])} {for_terminal(scope['path'][:_NOTED])} {outcome}"
        self.lines.append(line)
        _log.info("%s", line)
