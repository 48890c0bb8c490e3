"""One fresh local Hub for each test, spoken to by the real client; after each, every repository passes git fsck."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from huggingface_hub import HfApi, close_session

from publisher.hub.local import LocalHub, Role

REPO = "team/adapter"
Client = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    """A running local Hub with a write token and a read token."""
    with LocalHub(tmp_path / "hub", {"hf_write_token": Role.WRITE, "hf_read_token": Role.READ}) as hub:
        yield hub
        close_session()
    for repository in hub.repositories():
        assert repository.fsck() == ()


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    """The client, with the write token."""
    return HfApi(endpoint=hub.endpoint, token=hub.token)


@pytest.fixture
def repo(api: HfApi) -> str:
    """A repository with its initial commit."""
    api.create_repo(REPO)
    return REPO


@pytest.fixture
def client(hub: LocalHub, tmp_path: Path) -> Client:
    """Runs Python code in a process of its own, whose environment alone points the client at the local Hub."""

    def run(code: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        base = {
            "PATH": os.environ["PATH"],
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "client"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=base | environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run
