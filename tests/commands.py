"""`publish`, run in the process of the test: what a user sees of it, without the seconds that importing takes."""

import io
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from huggingface_hub.utils import _auth

from publisher.cli.app import main

_LOGGERS = ("huggingface_hub", "transformers", "httpx")  # which a command quietens


@dataclass(frozen=True)
class Answer:
    """What a command line printed, and its exit code, under the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def publish(*arguments: str, folder: Path | None = None, **environment: str) -> Answer:
    """Run `publish` with these arguments in the working folder or another, with these variables besides."""
    out, err = _stream(), _stream()
    with _as_it_was(), pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder or Path.cwd())
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["publish", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    assert isinstance(ended.value.code, int)
    return Answer(ended.value.code, _written(out), _written(err))


def _stream() -> io.TextIOWrapper:
    """A stream that takes octets too, as those of a process do."""
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)


def _written(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


def publish_as(command: str, *, folder: Path, environment: Mapping[str, str]) -> Answer:
    """Run a command line `publish ...` that asks nothing of a shell, in this folder, with this environment alone."""
    name, *arguments = shlex.split(command)
    assert name == "publish", command
    with pytest.MonkeyPatch.context() as patch, environment_of(environment):
        patch.chdir(folder)
        return publish(*arguments)


@contextmanager
def environment_of(environment: Mapping[str, str]) -> Iterator[None]:
    """Have this environment alone, and huggingface_hub as if it had been imported in it."""
    with pytest.MonkeyPatch.context() as patch:
        _use(environment, patch)
        try:
            yield
        finally:
            close_session()


def _use(environment: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - environment.keys():
        patch.delenv(name)
    for name, value in environment.items():
        patch.setenv(name, value)
    close_session()  # its connections may go through a proxy that this user has not
    home = Path(environment.get("HF_HOME", Path.home() / ".cache/huggingface"))
    endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co")
    patch.setattr(constants, "ENDPOINT", endpoint)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", environment.get("HF_HUB_CACHE", str(home / "hub")))
    patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    patch.setattr(_auth, "_OIDC_TOKEN_CACHE", None)


@contextmanager
def _as_it_was() -> Iterator[None]:
    """Take back what a command sets for the rest of its process."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    factory, written = logging.getLogRecordFactory(), warnings.formatwarning
    try:
        yield
    finally:
        logging.setLogRecordFactory(factory)
        warnings.formatwarning = written
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
