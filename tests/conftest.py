"""Fixtures that several test modules share."""

import os
from pathlib import Path

import pytest

from publisher.demo import make_demo

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch loads; on small matrices threads wait for each other


@pytest.fixture(scope="session")
def demo_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder: `clef`, `clef-base`, `clef-flash` and `clef-flash-base`. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("session") / "demo"
    make_demo(folder)
    return folder
