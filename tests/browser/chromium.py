"""Chromium, headless, by its own protocol over a pipe: no driver and no further package stands in between."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--remote-debugging-pipe",
)
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
_PATIENCE = 60.0  # seconds for one answer
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded")


def installed() -> str:
    """The browser's path; a machine without one fails, and is told how to get it."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    assert found is not None, f"no {' or '.join(NAMES[:3])} here; on Debian: apt-get install chromium"
    return found


@dataclass
class Browser:
    """A running browser: commands go down one pipe, answers and events come up the other."""

    into: int
    out: int
    events: list[dict[str, Any]] = field(default_factory=list)
    _numbers: "count[int]" = field(default_factory=lambda: count(1))
    _rest: bytes = b""

    def command(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self.into, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, method: str) -> None:
        """Until an event of this name has come."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self.out], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"the browser said nothing for {_PATIENCE:.0f} seconds"
            piece = os.read(self.out, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def running(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile, ended with the block."""
    down, up = os.pipe(), os.pipe()
    far = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (down[0], up[1])]  # clear of 3 and 4, which the browser uses
    line = ["bash", "-c", f'exec "$0" "$@" 3<&{far[0]} 4>&{far[1]}', installed(), *FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(line, pass_fds=far, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (*far, down[0], up[1]):
        os.close(end)
    try:
        yield Browser(down[1], up[0])
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(down[1])
        os.close(up[0])


@dataclass(frozen=True)
class Page:
    """One page: what it shows, what it complains of, what it asks the network for."""

    browser: Browser
    session: str

    @classmethod
    def opened(cls, browser: Browser, file: Path, *, width: int, height: int, dark: bool = False) -> "Page":
        """The file in a window of this size, loaded."""
        target = browser.command("Target.createTarget", url="about:blank")["targetId"]
        session = browser.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = cls(browser, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.command(f"{domain}.enable")
        page.resize(width, height, dark=dark)
        page.load("Page.navigate", url=file.resolve().as_uri())
        return page

    def load(self, command: str, **parameters: Any) -> None:
        """Go somewhere, or there again, and wait until everything is there."""
        self.browser.events.clear()
        self.command(command, **parameters)
        self.browser.wait_for("Page.loadEventFired")

    def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command to this page."""
        return self.browser.command(method, session=self.session, **parameters)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Another window, another colour scheme."""
        mobile, scheme = width < 600, "dark" if dark else "light"
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def value(self, script: str) -> Any:
        """What this expression comes to."""
        answer = self.command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One key down and up; Enter and Space act as on a keyboard."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, " ": 32, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            typed = {"text": text} if text and kind == "keyDown" else {}
            self.command("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def click(self, x: float, y: float) -> None:
        """The left button at this place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def complaints(self) -> list[dict[str, Any]]:
        """Exceptions, errors on the console, and what the page's policy forbade."""
        self.value("1")  # whatever was on its way has come
        events = [event for event in self.browser.events if event.get("sessionId") == self.session]
        logged = [e for e in events if e["method"] == "Runtime.consoleAPICalled" and e["params"]["type"] == "error"]
        return [*logged, *(event for event in events if event["method"] in _COMPLAINTS)]

    def requests(self) -> list[str]:
        """Every address that the page asked for."""
        events = (event for event in self.browser.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in events]

    def screenshot(self, file: Path, *, most: int = 20_000) -> None:
        """The page from its top, `most` pixels of it, as a PNG."""
        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(shot["data"]))


Open = Callable[..., Page]
