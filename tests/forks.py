"""Processes of their own in which torch, PEFT and this project are imported: one starts in milliseconds."""

import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from publisher.pipeline.stages import read_back
from tests.commands import Answer, environment_of, publish_as

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).parents[1]
_IMPORTED = [
    "publisher.audits",
    "publisher.loaders",
    "publisher.cli.loaders",
    "publisher.pipeline.run",
    "publisher.pipeline.stages.extract",
    "publisher.pipeline.stages.read_back",
    "publisher.pipeline.stages.validate",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_5.modeling_qwen3_5",
    "tests.forks",
]


@cache
def forks() -> ForkServerContext:
    """Return the one server of the session, which forks a process for each that is asked for."""
    assert all(find_spec(name) for name in _IMPORTED), "the server passes over what it cannot import"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # the server reads no other path before it preloads
        context.Process(target=os.getpid).start()
    return context


@dataclass(frozen=True)
class Apart:
    """What a command printed in a process of its own, and the most memory that this process took."""

    answer: Answer
    mebibytes: int


def publish_apart(command: str, *, environment: Mapping[str, str], seconds: float) -> Apart:
    """Run `publish ...` in the working folder, in a process of its own that is ended after so many seconds."""
    receiver, sender = forks().Pipe(duplex=False)
    process = forks().Process(target=_publish, args=(command, Path.cwd(), dict(environment), sender))
    process.start()
    sender.close()
    try:
        assert receiver.poll(seconds), f"{command} did not end in {seconds} seconds"
        apart: Apart = receiver.recv()
        return apart
    finally:
        process.kill()
        process.join()


def loaded_apart(requests: str, environment: Mapping[str, str]) -> Answer:
    """Do what reading back does in a process of its own, in one that has imported everything already."""
    receiver, sender = forks().Pipe(duplex=False)
    process = forks().Process(target=_load, args=(requests, dict(environment), sender))
    process.start()
    sender.close()
    answer: Answer = receiver.recv()
    process.join()
    return answer


def _load(requests: str, environment: dict[str, str], sender: "Connection[Answer, Answer]") -> None:
    with environment_of(environment):
        sender.send(Answer(0, read_back._main(requests), ""))


def _publish(command: str, folder: Path, environment: dict[str, str], sender: "Connection[Apart, Apart]") -> None:
    answer = publish_as(command, folder=folder, environment=environment)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    sender.send(Apart(answer, int(peak[1]) // 1024))
