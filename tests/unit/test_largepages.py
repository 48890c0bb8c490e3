"""Large pages are asked for before torch takes memory, and only where the user has not decided."""

import os

import pytest

from publisher.largepages import ask_for_large_pages


def test_large_pages_are_asked_for_unless_the_user_has_decided_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    ask_for_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    ask_for_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
