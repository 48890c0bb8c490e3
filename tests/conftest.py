"""What all tests share.

Golden files hold text exactly as a user sees it. After a change that is meant, write them anew and read the diff:

    UPDATE_GOLDEN=1 python -m pytest tests
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from publisher.demo import make_demo
from publisher.files import packaged_folder
from publisher.pipeline import Run, run
from publisher.progress import silent

# The matrices of the tests are small: threads would only wait for each other. Read by torch when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts the tests in the background leaves SIGINT ignored, and so it would be in every process of theirs.
signal.signal(signal.SIGINT, signal.default_int_handler)

Golden = Callable[[Path, str], None]


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


@pytest.fixture(scope="session")
def demo_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder: `clef`, `clef-base`, `clef-flash` and `clef-flash-base`. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("session") / "demo"
    make_demo(folder)
    return folder


@pytest.fixture(scope="session")
def demo_run(demo_pairs: Path) -> Path:
    """A folder in which manifests/demo.yaml was run once for all tests: ./demo, ./dist/demo and ./dist/demo.work.

    Read it, never write into it.
    """
    with contextlib.chdir(demo_pairs.parent):
        run(Run(packaged_folder("manifests") / "demo.yaml", Path("dist"), device="cpu", dry_run=True), silent)
    return demo_pairs.parent


@pytest.fixture
def own_demo_run(demo_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run to change or spoil, in the working folder, with a manifest of its own: ./demo.yaml.

    The pairs in ./demo are links to the session's.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo_run / "dist", "dist")
    Path("demo").mkdir()
    for pair in (path for path in (demo_run / "demo").iterdir() if path.is_dir()):
        Path("demo", pair.name).symlink_to(pair)
    shutil.copy(packaged_folder("manifests") / "demo.yaml", "demo.yaml")
    return tmp_path
