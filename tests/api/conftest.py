"""A small pair, for all tests of the Python API."""

from pathlib import Path

import pytest

from examples.small_pair import make_pair
from tests.conftest import once, shared_folder


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and `tuned`: a LoRA of rank 8 on three linears of each of four layers."""
    folder = shared_folder(tmp_path_factory) / "pair"
    once(tmp_path_factory, "pair", lambda: make_pair(folder))
    return folder


@pytest.fixture
def models(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That pair as ./models, in a working folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    Path("models").symlink_to(pair)
    return Path("models")
