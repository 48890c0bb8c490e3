"""`--engine ray`: the same bytes as on one machine, whatever happens to the cluster meanwhile."""

import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.clusters import Machines, two_machines
from tests.manypairs import make_pair

FEW, MANY = 60, 1000
EARLY = 200
pytestmark = [pytest.mark.ray, pytest.mark.long]
SLACK = 25e6  # bytes; the factors of the modules after the early ones are 39 MB, their weights 118 MB


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


def extract(dist: Path, *, engine: str) -> None:
    run(Run(Path("pico.yaml"), dist, device="cpu", engine=engine, last="extract"), silent)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept(dist: Path) -> int:
    return len(list(dist.glob("pico.work/root/modules-*/*.json")))


@pytest.mark.usefixtures("machines")
def test_the_demo_gives_the_same_bytes_on_a_cluster(own_small_run: Path) -> None:
    options = Run(Path("demo.yaml"), Path("again"), device="cpu", engine="ray", last="loaders")
    run(options, silent)
    run(replace(options, first="verify", last="verify", variants=("clef-flash/",)), silent)
    ours, theirs = (files_of(own_small_run / dist / "demo") for dist in ("again", "dist"))
    both = {name for name in ours if name.endswith((".json", ".safetensors"))}
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}
    assert theirs.keys() - ours.keys() == {"README.md", "manifest.yaml", "verification.json"} | {
        f"{folder}{chart}.svg" for folder in ("", "clef-flash/") for chart in ("errors", "spectrum")
    }


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
    _, told = process.communicate(timeout=120)
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
    until = time.monotonic() + 120
    while time.monotonic() < until:
        titles = (process.info["cmdline"] or [""] for process in psutil.process_iter(["cmdline"]))
        if not any(title[0].startswith(name) for title in titles):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.usefixtures("machines")
def test_the_driver_takes_no_more_memory_as_a_thousand_pairs_go_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair(tmp_path, modules=MANY)
    monkeypatch.chdir(tmp_path)
    done = subprocess.run([sys.executable, "-c", MEASURED], capture_output=True, text=True, check=False)
    assert kept(Path("dist")) == MANY, done.stderr
    peaks = [int(line) * 1024 for line in done.stdout.splitlines()]
    assert len(peaks) == 2
    assert peaks[1] < peaks[0] + SLACK, f"{peaks[0] / 1e6:.0f} MB became {peaks[1] / 1e6:.0f} MB"


# The kernel's own figure of the peak: what getrusage says of a child starts from its parent's.
MEASURED = rf"""
import re
from pathlib import Path
from publisher.pipeline.run import Run, run

def tell_peak():
    print(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

early = [0]

def listen(what, done=0, total=0):
    if what.startswith("extracting") and done >= {EARLY} and early:
        early.clear()
        tell_peak()

run(Run(Path("pico.yaml"), Path("dist"), device="cpu", engine="ray", last="extract"), listen)
tell_peak()
"""


def command(*arguments: str) -> "subprocess.Popen[str]":
    """`publish` up to the adapter."""
    whole = [sys.executable, "-m", "publisher", "-m", "pico.yaml", "--until", "extract", "--device", "cpu", *arguments]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
