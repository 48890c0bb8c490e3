"""Ray clusters of two machines with one processor each, on this machine, and small jobs to run on them."""

import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.cluster_utils import Cluster

from publisher.engines import Begin, Finish, Job, Report
from publisher.errors import ExtractionError, FetchError

ROOT = Path(__file__).parents[1]
_MACHINE = {"num_cpus": 1, "object_store_memory": 100_000_000}


@dataclass(frozen=True)
class Machines:
    """A cluster, and its second machine, which can be lost."""

    cluster: Any
    second: Any
    port: int

    @property
    def from_outside(self) -> str:
        """What `--engine` is given on a machine that is not in the cluster."""
        return f"ray://127.0.0.1:{self.port}"

    def lose_second(self) -> None:
        """All of its processes are killed."""
        self.cluster.remove_node(self.second, allow_graceful=False)


@contextmanager
def two_machines(**environment: str) -> Iterator[Machines]:
    """A cluster that `--engine ray` finds for as long as the block runs; its workers have these variables too."""
    with started(**environment) as machines, reachable(machines, **environment):
        yield machines


@contextmanager
def started(**environment: str) -> Iterator[Machines]:
    """A cluster that nobody finds who does not know its address."""
    port = _free_port()
    head = {**_MACHINE, "include_dashboard": False, "ray_client_server_port": port}
    with _settings(**environment):
        with warnings.catch_warnings(
            action="ignore", category=ResourceWarning
        ):  # Ray leaves its log files to the collector
            cluster = Cluster(initialize_head=True, head_node_args=head)
        second = cluster.add_node(**_MACHINE)
    try:
        yield Machines(cluster, second, port)
    finally:
        cluster.shutdown()


@contextmanager
def reachable(machines: Machines, **environment: str) -> Iterator[None]:
    """Let `--engine ray` find this cluster for as long as the block runs."""
    with _settings(RAY_ADDRESS=machines.cluster.address, **environment):
        yield


@contextmanager
def _settings(**environment: str) -> Iterator[None]:
    usual = {
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # or other tests would go before
        "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120",  # seconds, on a busy machine
        "GRPC_ENABLE_FORK_SUPPORT": "0",  # with it, Ray's server for clients now and then fails to fork
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (usual | environment).items():
            patch.setenv(name, value)
        yield


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Squares(Job[int, tuple[int, int]]):
    """The square of a number, and which process found it.

    Attributes:
        folder: where attempts leave a file each.
        fails: what happens to `number`: `dies`, `dies once`, `cannot be read`, `is refused`.
        standing_: bytes that are said to stay in memory between units.
        pause: seconds that each takes.
    """

    folder: Path
    fails: str = ""
    number: int = 3
    standing_: int = 0
    pause: float = 0.0

    @property
    def standing(self) -> int:
        """As told."""
        return self.standing_

    def label(self, unit: int) -> str:
        """The number."""
        return f"squaring {unit}"

    def memory(self, unit: int) -> int:
        """Next to nothing."""
        return unit

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[int, tuple[int, int]]]:
        """Leaves a file."""
        assert device.type == "cpu"
        self._leave("opened")
        yield self._begin
        self._leave("closed")

    def _begin(self, unit: int) -> Finish[tuple[int, int]]:
        before = len(list(self.folder.glob(f"tried-{unit}-*")))
        self._leave(f"tried-{unit}")
        if unit == self.number:
            self._fail(before)

        def finish(report: Report) -> tuple[int, int]:
            time.sleep(self.pause)
            report(f"found {unit * unit}")
            return unit * unit, os.getpid()

        return finish

    def _fail(self, before: int) -> None:
        if self.fails == "dies" or (self.fails == "dies once" and not before):
            os._exit(7)
        if self.fails == "cannot be read":
            raise FetchError("a file is missing", expected="it", next_step="look for it")
        if self.fails == "is refused":
            raise ExtractionError("it holds NaN", expected="a number", next_step="check it")

    def _leave(self, what: str) -> None:
        (self.folder / f"{what}-{os.getpid()}-{time.time_ns()}").touch()
