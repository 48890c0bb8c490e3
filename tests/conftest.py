"""What all tests share.

Golden files hold text exactly as a user sees it. After a change that is meant, write them anew and read the diff:

    UPDATE_GOLDEN=1 python -m pytest tests
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from publisher.demo import make_demo

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
