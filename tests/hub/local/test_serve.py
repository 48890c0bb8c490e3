"""`python -m publisher.hub.local`, and what happens without the optional dependencies."""

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from publisher.errors import PublisherError
from publisher.hub.local import LocalHub

WHOAMI = "from huggingface_hub import HfApi; print(HfApi().whoami()['fullname'])"
LINES = 6


def test_the_printed_environment_points_the_client_at_the_local_hub(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "publisher.hub.local", "--root", str(tmp_path / "hub")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        lines = [server.stdout.readline() for _ in range(LINES)]
        script = "".join(lines) + f'"{sys.executable}" -c "{WHOAMI}"'
        answer = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
        server.send_signal(signal.SIGINT)
        rest, errors = server.stdout.read(), server.stderr.read()
    assert answer.stdout == "local Hub\n", answer.stderr
    assert (server.returncode, rest, errors) == (0, "", "")
    assert re.match(r"# local Hub .* at http://127.0.0.1:\d+", lines[0])


def test_tokens_are_kept_for_their_owner_and_never_printed(tmp_path: Path) -> None:
    shown = []
    for _ in range(2):
        command = [sys.executable, "-m", "publisher.hub.local", "--root", str(tmp_path / "hub")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            shown += [server.stdout.readline() for _ in range(LINES)]
            server.send_signal(signal.SIGINT)
        tokens = [(tmp_path / "hub" / f"{role}.token").read_text() for role in ("write", "read")]
        assert len(set(tokens)) == 2
        assert not [line for line in shown for token in tokens if token in line]
    assert (tmp_path / "hub" / "write.token").stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_reported_with_the_way_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PublisherError, match=rf"port {port}.*Next: name another port"):
            LocalHub(tmp_path, port=port)


def test_asking_for_a_repository_that_is_not_there_is_an_error(hub: LocalHub) -> None:
    with pytest.raises(PublisherError, match="no such repository: models/team/nothing"):
        hub.repository("team/nothing")


@pytest.mark.parametrize("module", ["pygit2", "starlette", "uvicorn", "jwt", "lz4.frame"])
def test_a_missing_dependency_is_reported_with_the_command_that_installs_it(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; import publisher.hub.local"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"the local Hub needs {module}" in failed.stderr
    assert "pip install 'lora-publisher[localhub]'" in failed.stderr
