"""`--engine ray`: the same bytes as on one machine, whatever happens to the cluster meanwhile."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from publisher.pipeline import Run, run
from publisher.progress import silent
from tests.clusters import ROOT, Machines, two_machines
from tests.manypairs import make_pair

FEW, MANY = 150, 1000
SLACK = 30e6  # bytes; the factors of all modules that are more are 42 MB


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pair of few modules, its manifest, and what the local engine makes of it in ./local."""
    folder = tmp_path_factory.mktemp("few")
    make_pair(folder, modules=FEW)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        extract(Path("local"), engine="local")
    return folder


@pytest.fixture
def place(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with that pair."""
    (tmp_path / "pair").symlink_to(pair / "pair")
    shutil.copy(pair / "pico.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """Two machines; no test takes one away."""
    with two_machines() as running:
        yield running


def extract(dist: Path, *, engine: str) -> None:
    run(Run(Path("pico.yaml"), dist, device="cpu", engine=engine, last="extract"), silent)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(dist: Path) -> int:
    return len(list(dist.glob("pico.work/root/modules-*/*.json")))


@pytest.mark.usefixtures("machines")
def test_the_demo_gives_the_same_bytes_on_a_cluster(own_small_run: Path) -> None:
    run(Run(Path("demo.yaml"), Path("again"), device="cpu", engine="ray", last="card"), silent)
    assert files_of(own_small_run / "again/demo") == files_of(own_small_run / "dist/demo")


@pytest.mark.usefixtures("place")
def test_from_outside_the_cluster_it_gives_the_same_bytes(pair: Path, machines: Machines) -> None:
    extract(Path("dist"), engine=machines.from_outside)
    assert files_of(Path("dist/pico")) == files_of(pair / "local/pico")


@pytest.mark.usefixtures("place")
def test_a_machine_that_is_lost_changes_nothing_but_the_time(pair: Path) -> None:
    with two_machines() as machines:
        lost: list[int] = []

        def listen(what: str, done: int = 0, total: int = 0) -> None:
            assert total >= done
            if what.startswith("extracting") and done > FEW // 3 and not lost:
                lost.append(done)
                machines.lose_second()

        run(Run(Path("pico.yaml"), Path("dist"), device="cpu", engine="ray", last="extract"), listen)
    assert lost
    assert files_of(Path("dist/pico")) == files_of(pair / "local/pico")


@pytest.mark.usefixtures("place", "machines")
def test_ctrl_c_ends_the_run_and_its_tasks_and_the_next_run_goes_on_from_there(pair: Path) -> None:
    process = command("--engine", "ray")
    while kept(Path("dist")) < FEW // 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "what was finished is kept, the same command goes on from there" in told
    before = {path: path.stat().st_mtime_ns for path in Path("dist").glob("pico.work/root/modules-*/*.json")}
    assert FEW // 3 <= len(before) < FEW
    assert gone("ray::extracting"), "no task of the run is left on the cluster"
    extract(Path("dist"), engine="local")
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items()), "none is made again"
    assert files_of(Path("dist/pico")) == files_of(pair / "local/pico")


def gone(name: str) -> bool:
    """No process of this name is left after some seconds at most."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        titles = (process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"]))
        if not any(title[0].startswith(name) for title in titles):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.usefixtures("machines")
def test_the_driver_takes_no_more_memory_for_a_thousand_pairs(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair(tmp_path, modules=MANY)
    peaks = []
    for folder in (pair, tmp_path):
        monkeypatch.chdir(folder)
        done, told = command("--engine", "ray", "--dist", "measured").communicate()
        peaks.append(int(done.splitlines()[-1]) * 1024)
        assert kept(folder / "measured") == (FEW if folder == pair else MANY), told
    assert peaks[1] < peaks[0] + SLACK, f"{peaks[0] / 1e6:.0f} MB became {peaks[1] / 1e6:.0f} MB"


# The kernel's own figure of the peak: what getrusage says of a child starts from its parent's.
COMMAND = r"""
import re, sys
from pathlib import Path
from publisher import cli
sys.exit = lambda code: code and exit(code)
cli.main()
print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def command(*arguments: str) -> "subprocess.Popen[str]":
    """`publish` up to the adapter, as a process that ends with its peak memory in kB."""
    whole = [sys.executable, "-c", COMMAND, "-m", "pico.yaml", "--until", "extract", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
