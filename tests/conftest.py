"""Fixtures that more than one test module uses."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def golden() -> Callable[[Path, str], None]:
    """Compare a text with a kept file; UPDATE_GOLDEN=1 rewrites the file instead."""

    def compare(path: Path, text: str) -> None:
        if os.environ.get("UPDATE_GOLDEN") == "1":
            path.write_text(text, encoding="utf-8", newline="")
        assert text == path.read_text(encoding="utf-8")

    return compare
