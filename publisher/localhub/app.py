"""The ASGI application: every address of the local Hub, how it is read, and what is noted of each request."""

import logging
from typing import ClassVar
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from publisher.border.escape import for_terminal
from publisher.localhub.context import Context
from publisher.localhub.refusals import Refusal, answer_refusal

_log = logging.getLogger("publisher.localhub")


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


register_url_convertor("quoted", _Quoted())
register_url_convertor("quoted_path", _QuotedPath())
register_url_convertor("kind", _Kind())


def routes() -> list[Route]:
    """Every address, in the order in which they are tried."""
    from publisher.localhub.routes import accounts, commits, files, lfs, refs, repos, xet

    parts = (accounts, lfs, xet, commits, refs, files, repos)
    return [route for part in parts for route in part.ROUTES]


def application(context: Context) -> ASGIApp:
    """The local Hub of this context."""
    app = Starlette(routes=routes(), exception_handlers={Refusal: answer_refusal})
    app.state.context = context
    return app


class Journal:
    """Routes on the path as it was sent, notes method, path and status of each request, and counts what it sends.

    Neither headers, queries nor bodies are noted: they are where tokens travel.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.lines: list[str] = []
        self.bytes_sent = 0
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, and note it."""
        scope["path"] = scope["raw_path"].decode("ascii")
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
        self.lines.append(for_terminal(f"{scope['method']} {scope['path']} {outcome}"))
        _log.info("%s", self.lines[-1])
