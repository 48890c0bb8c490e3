"""The local Hub: a stand-in for the Hugging Face Hub on this machine's loopback address.

It answers the unmodified `huggingface_hub` client, so that publishing can be rehearsed and tested without a network:
git repositories, LFS and Xet storage, tokens, trusted publishing, and faults on demand. docs/local-hub.md says what
it covers. It is not the Hub, and everything it reports says so.

    with LocalHub(Path("hub")) as hub:
        HfApi(endpoint=hub.endpoint, token=hub.token).create_repo("team/adapter")
        hub.repository("team/adapter").head()

It refuses to start without its optional dependencies, with the command that installs them.
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
