"""The local Hub: a stand-in for the Hugging Face Hub on this machine's loopback address.

It answers the unmodified `huggingface_hub` client, so that publishing can be rehearsed and tested without a network:
git repositories, LFS and Xet storage, tokens, trusted publishing, and faults on demand. It is not the Hub, and
everything it reports says so. docs/local-hub.md says what it covers.

    python -m publisher.hub.local --root hub

    with LocalHub(Path("hub")) as hub:
        HfApi(endpoint=hub.endpoint, token=hub.token).create_repo("team/adapter")
        hub.repository("team/adapter").head()

It is a project of its own inside this package: it imports `publisher.border` and `publisher.errors`, nothing else of
it, and nothing of `huggingface_hub`. It refuses to start without its dependencies, with the command that installs
them (the extra `localhub`); it answers this machine alone, and refuses a request before it reads what is too large.

Begin reading with `server`, which starts and stops it, then `app`, which has the addresses, and `routes/`, with one
module for each part of the API. Behind them: `repositories` (git), `lfs`, `xet` and `xet_format` (storage), `auth` and
`oidc` (who may do what), `bodies` and `guard` (what a request may be), `faults`, and `refusals`, with every error code.
"""

from publisher.border.installing import install_command
from publisher.errors import PublisherError

_OPTIONAL = {"jwt", "lz4", "pygit2", "starlette", "uvicorn"}

try:
    from publisher.hub.local.auth import Role
    from publisher.hub.local.faults import Fault
    from publisher.hub.local.server import LocalHub, serve
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.partition(".")[0] not in _OPTIONAL:
        raise
    raise PublisherError(
        f"the local Hub needs {missing.name}, which is not installed",
        next_step=install_command("localhub"),
    ) from missing

__all__ = ["Fault", "LocalHub", "Role", "serve"]
