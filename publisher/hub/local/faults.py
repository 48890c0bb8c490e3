"""Faults on demand, so that tests can see what a client does when the Hub misbehaves.

A fault waits for requests that match it, and spoils the next ones: with a status, with a cut connection, or with a
delay alone; before the request takes effect, or after it has, so that only the answer is lost; or in the middle of
the answer.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ARRIVAL = 0.05  # seconds for what was sent to arrive: closing the connection at once would take it back


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` requests of this method whose path matches `path`, a regular expression.

    `status` is answered in place of the real answer; `cut` closes the connection without one, `cut_after` after so
    many bytes of the real one's body; with none of them the real answer comes, late. With `after_effect` the request
    is carried out first. `delay` is in seconds, `retry_after` fills that header.
    """

    method: str
    path: str
    status: int | None = None
    cut: bool = False
    after_effect: bool = False
    delay: float = 0.0
    retry_after: int | None = None
    cut_after: int | None = field(default=None, kw_only=True)
    times: int = field(default=1, kw_only=True)

    def hits(self, scope: Scope) -> bool:
        """Return whether this fault is still due, and this request is one to spoil."""
        return self.times > 0 and scope["method"] == self.method and bool(re.search(self.path, scope["path"]))

    @property
    def replaces_answer(self) -> bool:
        """Whether the client gets something else than the real answer."""
        return self.cut or self.status is not None


class Faults:
    """The faults that wait, and the middleware that lets them happen. `cut_connection` closes that of a request."""

    def __init__(self, app: ASGIApp, cut_connection: Callable[[Scope], None]) -> None:
        self._app = app
        self._cut = cut_connection
        self._waiting: list[Fault] = []

    def add(self, fault: Fault) -> None:
        """Put one more fault behind those that wait already."""
        self._waiting.append(fault)

    def clear(self) -> None:
        """Remove all faults that wait."""
        self._waiting.clear()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or let it go wrong."""
        fault = next((fault for fault in self._waiting if fault.hits(scope)), None)
        if fault is None:
            await self._app(scope, receive, send)
            return
        fault.times -= 1
        await asyncio.sleep(fault.delay)
        if fault.after_effect and fault.replaces_answer:
            await self._app(scope, receive, _nowhere)
        if fault.cut:
            self._cut(scope)
            await asyncio.sleep(0)  # so that uvicorn has seen the connection close, and answers nothing itself
        elif fault.status is not None:
            await _drain(receive, unless=fault.after_effect)
            await _answer(fault)(scope, receive, send)
        elif fault.cut_after is not None:
            await self._app(scope, receive, self._until(fault.cut_after, scope, send=send))
        else:
            await self._app(scope, receive, send)

    def _until(self, byte: int, scope: Scope, *, send: Send) -> Send:
        """Send an answer up to this byte of its body, and close the connection there."""
        left = byte

        async def sending(message: Message) -> None:
            nonlocal left
            body = message.get("body", b"")
            if len(body) <= left:
                left -= len(body)
                await send(message)
            elif left >= 0:
                await send({**message, "body": body[:left], "more_body": True})
                left = -1  # the application goes on; nothing more of it is sent
                await asyncio.sleep(_ARRIVAL)
                self._cut(scope)
                await asyncio.sleep(0)

        return sending


async def _drain(receive: Receive, *, unless: bool) -> None:
    """Take in the request, unless that is done: an answer before its end could break the connection instead."""
    more = not unless
    while more:
        more = (await receive()).get("more_body", False)


async def _nowhere(_: Message) -> None:
    """Forget an answer instead of sending it."""


def _answer(fault: Fault) -> JSONResponse:
    headers = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
    return JSONResponse({"error": "local Hub: a fault that was asked for"}, fault.status or 500, headers=headers)
