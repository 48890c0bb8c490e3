"""Starting and stopping a local Hub: in a background thread for a `with` block, or until Ctrl-C.

It listens on 127.0.0.1 alone, and is the same server under the name `localhost`, which serves as the other origin
from which large files come.
"""

import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self

import uvicorn
from starlette.types import Scope

from publisher.border.echo import echo
from publisher.errors import PublisherError
from publisher.hub.local.app import Journal, application
from publisher.hub.local.auth import Role, Tokens
from publisher.hub.local.context import Context
from publisher.hub.local.faults import Faults
from publisher.hub.local.lfs import LfsStore
from publisher.hub.local.oidc import Issuer, TrustedPublishers
from publisher.hub.local.refusals import Refusal
from publisher.hub.local.repositories import Repositories, Repository
from publisher.hub.local.xet import XetStore

_HOST = "127.0.0.1"


class LocalHub:
    """A local Hub that keeps its data below `root`, and runs while its `with` block does.

    Args:
        root: The folder of its data; what an earlier local Hub left there is served again.
        tokens: The tokens that it accepts, each with its role; one write token of its own making if left out.
        port: A port of 127.0.0.1, or 0 for a free one.
        part_size: Bytes above which LFS uploads are asked for in parts; never, if left out.

    Attributes:
        endpoint: its address.
        faults: what goes wrong on demand.
        app: the ASGI application, for whoever wants to ask it in process.

    Raises:
        PublisherError: the port is taken.
    """

    def __init__(
        self,
        root: Path,
        tokens: Mapping[str, Role] | None = None,
        *,
        port: int = 0,
        part_size: int | None = None,
    ) -> None:
        self._tokens = dict(tokens or {_new_token(): Role.WRITE})
        self._socket = _listening(port)
        self.endpoint = f"http://{_HOST}:{self.address[1]}"
        self._context = _context(root, self.endpoint, tokens=self._tokens, part_size=part_size)
        self.faults = Faults(application(self._context), self._cut)
        self.app = Journal(self.faults)
        config = uvicorn.Config(
            self.app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            proxy_headers=False,
            server_header=False,
            headers=[("server", "local-hub"), ("x-request-id", "local Hub")],  # the client shows it in its errors
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)

    @property
    def address(self) -> tuple[str, int]:
        """The host and the port that it listens on."""
        host, port = self._socket.getsockname()
        return str(host), int(port)

    @property
    def token(self) -> str:
        """A token that may write, or the first one if none may."""
        return next((token for token, role in self._tokens.items() if role is Role.WRITE), next(iter(self._tokens)))

    @property
    def requests(self) -> tuple[str, ...]:
        """Method, path and status of every request so far."""
        return tuple(self.app.lines)

    @property
    def bytes_sent(self) -> int:
        """Bytes in the bodies of all answers so far."""
        return self.app.bytes_sent

    @property
    def github(self) -> Issuer:
        """The stand-in for GitHub Actions, which gives CI jobs their ID tokens."""
        return self._context.issuer

    @property
    def trusted_publishers(self) -> TrustedPublishers:
        """Which CI jobs each repository trusts."""
        return self._context.publishers

    def repository(self, repo_id: str, *, kind: str = "models") -> Repository:
        """Return the bare repository behind `team/name`, to be inspected.

        Raises:
            PublisherError: there is none.
        """
        try:
            return self._context.repositories.get(f"{kind}/{repo_id}")
        except Refusal as refusal:
            raise PublisherError(f"{refusal.message}: {kind}/{repo_id}") from None

    def repositories(self) -> tuple[Repository, ...]:
        """Return every repository of this local Hub."""
        return self._context.repositories.all()

    def run(self) -> None:
        """Serve until the process is told to stop."""
        self._server.run(sockets=[self._socket])

    def __enter__(self) -> Self:
        self._thread = Thread(target=self.run, name="local Hub", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.close()

    def close(self) -> None:
        """Give its port back; needed only where it never ran."""
        self._socket.close()

    def _cut(self, scope: Scope) -> None:
        """Close the connection of a request without an answer."""
        for connection in list(self._server.server_state.connections):
            # only the protocol for HTTP/2 has no client, and h11 is the one chosen above
            if getattr(connection, "client", None) == scope["client"]:
                connection.transport.abort()


def serve(root: Path, port: int = 0) -> None:
    """Run a local Hub until Ctrl-C, and print the environment that points the Hub's client at it.

    Its two tokens are kept in files below `root`; what is printed names the file, not the token.
    """
    tokens = {_kept(root / f"{role.value}.token", _new_token()): role for role in (Role.WRITE, Role.READ)}
    hub = LocalHub(root, tokens, port=port)
    with suppress(KeyboardInterrupt):
        echo(f"# local Hub (a stand-in, not the Hub) at {hub.endpoint}, data in {root}")
        for line in environment_lines(hub.endpoint, root):
            echo(line)
        hub.run()


def environment_lines(endpoint: str, root: Path) -> tuple[str, ...]:
    """Return shell lines after which `hf`, `publish` and any user of huggingface_hub talk to this local Hub."""
    root = root.resolve()
    return (
        f"export HF_ENDPOINT={endpoint}",
        f"export HF_TOKEN=\"$(cat '{root / 'write.token'}')\"  # or read.token",
        f"export HF_HOME='{root / 'client'}'",
        "export NO_PROXY=127.0.0.1,localhost",
        "export HF_HUB_DISABLE_TELEMETRY=1",
    )


def _listening(port: int) -> socket.socket:
    try:
        listening = socket.create_server((_HOST, port))
    except OSError as error:
        raise PublisherError(
            f"the local Hub cannot listen on port {port} of {_HOST} ({error.strerror})",
            next_step="name another port, or none for a free one",
        ) from error
    # asyncio does not see that this is TCP, and would let head and body of each answer wait 40 ms for each other.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _context(root: Path, endpoint: str, *, tokens: Mapping[str, Role], part_size: int | None) -> Context:
    key = secrets.token_hex(32)
    accepted = Tokens(tokens, key)
    lfs = LfsStore(root / "lfs", part_size=part_size)
    return Context(
        endpoint=endpoint,
        storage_endpoint=endpoint.replace(_HOST, "localhost"),
        # hf_xet remembers for each CAS address which chunks it holds. Ports are used again; this address is not.
        cas_endpoint=f"{endpoint}/xet/{_kept(root / 'xet' / 'id', secrets.token_hex(8))}",
        repositories=Repositories(root / "repositories"),
        lfs=lfs,
        xet=XetStore(root / "xet", lfs=lfs),
        tokens=accepted,
        issuer=Issuer(endpoint, key),
        publishers=TrustedPublishers(endpoint, key, tokens=accepted),
    )


def _new_token() -> str:
    return f"hf_local_{secrets.token_hex(16)}"


def _kept(path: Path, fresh: str) -> str:
    """Return the text of this file; where there is none, `fresh` is written to it, for its owner's eyes only."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(fresh, encoding="utf-8")
    return path.read_text(encoding="utf-8")
