"""The Ray cluster that this process joins: its address, for how long, and what its machines have.

Starting and stopping a cluster is its owner's business; where there is none, Ray is started on this machine alone, for
as long as the run. An address that nobody answers at is refused.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import RayError

from publisher.engines.retries import reason_of
from publisher.errors import EngineError

_HAS_TOKEN = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
_ANSWER = 10.0  # seconds for which an address is tried
_FRESH = 1.0  # seconds for which what the cluster has counts as known


@contextmanager
def membership(address: str) -> Iterator[None]:
    """Make this process a member of the cluster for as long as the block runs.

    What Ray sets in the environment goes with the membership.

    Args:
        address: `ray://HOST:PORT`, or `ray`: the cluster that RAY_ADDRESS names or this machine is in, or a new one.

    Raises:
        EngineError: there is no such cluster.
    """
    before = _ray_variables()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere that nobody asked for
    try:
        _join(address)
        yield
    finally:
        ray.shutdown()
        for name in _ray_variables():
            del os.environ[name]
        os.environ.update(before)


def _ray_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_")}


def _join(address: str) -> None:
    """Join by Ray's own rule where only `ray` is said: RAY_ADDRESS, or the cluster of this machine, or a new one."""
    named = os.environ.get("RAY_ADDRESS", "") if address == "ray" else address
    if ":" in named:
        _require_answer(named, engine=address)
    elif not _HAS_TOKEN.intersection(os.environ) and not Path("~/.ray/auth_token").expanduser().exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # or Ray writes one that all later clusters ask for
    try:
        ray.init(named or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError, RayError) as error:
        raise _not_joined(address, reason_of(error)) from error


def _require_answer(named: str, *, engine: str) -> None:
    """Raise an error unless somebody is at this address: Ray itself would try for minutes."""
    host, _, port = named.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER).close()
    except (OSError, ValueError) as error:
        raise _not_joined(engine, f"{named}: {reason_of(error)}") from None


def _not_joined(engine: str, why: str) -> EngineError:
    return EngineError(
        f"--engine {engine}: no Ray cluster could be joined ({why})",
        expected="a running cluster with the Ray and Python of this machine, and its token if it asks for one",
        next_step="ray status on one of its machines; docs/cluster.md says how to start one",
    )


class Resources:
    """What the machines of the cluster have; machines come and go, so this is known for a second."""

    def __init__(self) -> None:
        self._asked = -_FRESH
        self._machines = list[dict[str, float]]()

    def total(self, resource: str) -> float:
        """Return how much of a resource (`CPU`, `GPU`, `memory`) all machines have together."""
        return sum(machine.get(resource, 0) for machine in self._now())

    def largest(self, resource: str) -> float:
        """Return how much of a resource the machine has that has most of it."""
        return max((machine.get(resource, 0) for machine in self._now()), default=0)

    def _now(self) -> list[dict[str, float]]:
        if time.monotonic() - self._asked > _FRESH:
            self._machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._asked = time.monotonic()
        return self._machines
