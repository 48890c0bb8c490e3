"""What all tests share.

Golden files hold text exactly as a user sees it. After a change that is meant, write them anew and read the diff:

    UPDATE_GOLDEN=1 python -m pytest tests
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from publisher.cli.demo.checkpoints import Pair, make_demo, make_pairs
from publisher.pipeline.run import Run, run
from publisher.records.files import packaged_folder
from publisher.records.progress import silent

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.clusters import Machines

# The matrices of the tests are small: threads would only wait for each other. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest-xdist gives its workers the width of its own terminal; what a test prints is as wide as in a pipe.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background leaves SIGINT ignored, and so it would be in every process of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast the machine is.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

Golden = Callable[[Path, str], None]

# The demo's recipe with one block of four layers adapted in each pair, where a sentence does not depend on how many.
SMALL_PAIRS = (
    Pair("clef", layers=8, first_adapted=4, hidden=96, intermediate=192, heads=6),
    Pair("clef-flash", layers=4, first_adapted=0, hidden=64, intermediate=128, heads=4),
)
_SMALL_EXPECTED = (
    ("linears: 186\n      layers: 40-63", "linears: 31\n      layers: 4-7"),
    ("linears: 248\n      layers: 0-31", "linears: 31\n      layers: 0-3"),
)


# Their tests share one Ray cluster, and so one worker.
ON_RAY = ("tests/integration/test_on_ray.py", "tests/integration/test_engines.py")

# The files that take longest, as measured: they begin first, so that no worker is left alone with one at the end.
LONGEST = (
    *ON_RAY,
    "tests/integration/test_documented_commands.py",
    "tests/integration/test_release.py",
    "tests/attacks/test_bit_flips.py",
    "tests/integration/test_streaming.py",
    "tests/pipeline/test_push.py",
    "tests/integration/test_verification.py",
    "tests/pipeline/test_extract.py",
    "tests/integration/test_interruption.py",
    "tests/integration/test_pipeline.py",
    "tests/integration/test_audit.py",
    "tests/integration/test_signing.py",
    "tests/integration/test_releases_of_before.py",
    "tests/pipeline/test_adding_a_stage.py",
    "tests/integration/test_exactly.py",
    "tests/attacks/test_outputs.py",
    "tests/pipeline/test_readback.py",
    "tests/inputs/test_experts.py",
    "tests/inputs/test_offline.py",
    "tests/api/test_extraction.py",
    "tests/records/test_closure.py",
    "tests/numerics/test_svd_and_noise.py",
    "tests/release/test_card.py",
    "tests/extraction/test_extract_module_exactly.py",
    "tests/manifest/test_manifest.py",
    "tests/border/test_patterns.py",
)


class _FileByFile(LoadFileScheduling):  # type: ignore[misc]
    """Gives each file to one worker: a module's fixtures are made once. pytest-xdist's own groups need pytest 9.0."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "ray" if file in ON_RAY else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> _FileByFile:
    """Return what spreads the tests over the workers."""
    return _FileByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    file = item.nodeid.partition("::")[0]
    return LONGEST.index(file) if file in LONGEST else len(LONGEST)


@pytest.fixture(scope="session")
def cluster() -> "Iterator[Machines]":
    """The one Ray cluster of all tests, of two machines; no test takes one away."""
    from tests.clusters import started

    with started() as machines:
        yield machines


@pytest.fixture(scope="module")
def machines(cluster: "Machines") -> "Iterator[Machines]":
    """That cluster, which `--engine ray` finds while the tests of one file run."""
    from tests.clusters import reachable

    with reachable(cluster):
        yield cluster


@pytest.fixture
def quick_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back in a process that has everything imported; tests/pipeline/test_readback.py starts one as users do."""
    from tests.forks import loaded_apart

    monkeypatch.setattr("publisher.pipeline.stages.read_back._in_a_process", loaded_apart)


@pytest.fixture
def golden() -> Golden:
    """`golden(path, text)`: the text is what the file holds, or becomes so under UPDATE_GOLDEN=1."""
    return _matches


def _matches(path: Path, text: str) -> None:
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    assert path.is_file(), f"{path} is missing; write it with UPDATE_GOLDEN=1"
    assert text == path.read_bytes().decode(), f"{path} differs; if that is meant: UPDATE_GOLDEN=1"


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """A folder for what all workers of pytest-xdist have in common."""
    return factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()


def once(factory: pytest.TempPathFactory, what: str, make: Callable[[], object]) -> None:
    """Make it in the first worker that needs it; the others wait."""
    done = shared_folder(factory) / f"{what}.made"
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            make()
            done.touch()


@pytest.fixture(scope="session")
def demo_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder: `clef`, `clef-base`, `clef-flash` and `clef-flash-base`. Read it, never write into it."""
    folder = shared_folder(tmp_path_factory) / "session" / "demo"
    once(tmp_path_factory, "pairs", lambda: make_demo(folder))
    return folder


@pytest.fixture(scope="session")
def demo_run(demo_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which manifests/demo.yaml was run once for all tests: ./demo, ./dist/demo and ./dist/demo.work.

    Read it, never write into it.
    """
    options = Run(packaged_folder("manifests") / "demo.yaml", Path("dist"), device="cpu", dry_run=True)
    with contextlib.chdir(demo_pairs.parent):
        once(tmp_path_factory, "run", lambda: run(options, silent))
    return demo_pairs.parent


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `demo_run` is, in a fifth of the time: the demo's manifest, ./demo.yaml, run on pairs of few layers.

    Read it, never write into it.
    """
    folder = shared_folder(tmp_path_factory) / "small"
    once(tmp_path_factory, "small", lambda: _run_small(folder))
    return folder


def _run_small(folder: Path) -> None:
    make_pairs(SMALL_PAIRS, folder / "demo", shard_size="500KB")
    manifest = (packaged_folder("manifests") / "demo.yaml").read_text(encoding="utf-8")
    for expected, smaller in _SMALL_EXPECTED:
        assert manifest.count(expected) == 1
        manifest = manifest.replace(expected, smaller)
    (folder / "demo.yaml").write_text(manifest, encoding="utf-8")
    with contextlib.chdir(folder):
        run(Run(Path("demo.yaml"), Path("dist"), device="cpu", dry_run=True), silent)


@pytest.fixture
def own_small_run(small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run to change or spoil, in the working folder; the pairs in ./demo are links to the session's."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(small_run / "dist", "dist")
    Path("demo").mkdir()
    for pair in (path for path in (small_run / "demo").iterdir() if path.is_dir()):
        Path("demo", pair.name).symlink_to(pair)
    shutil.copy(small_run / "demo.yaml", "demo.yaml")
    return tmp_path
