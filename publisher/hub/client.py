"""All that this tool asks of a Hub: `from publisher.hub import client as hub`, then `hub.download(...)`.

Each function asks one thing and answers with plain values, or raises one `HubError` that says what to do. The
endpoint and the token are huggingface_hub's own business (HF_ENDPOINT, HF_TOKEN, `hf auth login`, trusted publishing),
unless a `Destination` names others. The functions themselves are in the modules that this one lists.
"""

from publisher.hub.answers import RemoteFile
from publisher.hub.commits import (
    Account,
    NewCommit,
    account,
    commit,
    create_repository,
    create_tag,
    current_token,
    require_write,
    trusted_repository,
)
from publisher.hub.destination import THE_HUB, Destination, embedded
from publisher.hub.downloads import download, download_all, download_from_dataset, is_cached
from publisher.hub.repository import (
    commits_since,
    is_open,
    is_public,
    license_of,
    list_files,
    pull_requests,
    resolve_revision,
    tags,
)
from publisher.hub.streaming import stream

__all__ = [
    "THE_HUB",
    "Account",
    "Destination",
    "NewCommit",
    "RemoteFile",
    "account",
    "commit",
    "commits_since",
    "create_repository",
    "create_tag",
    "current_token",
    "download",
    "download_all",
    "download_from_dataset",
    "embedded",
    "is_cached",
    "is_open",
    "is_public",
    "license_of",
    "list_files",
    "pull_requests",
    "require_write",
    "resolve_revision",
    "stream",
    "tags",
    "trusted_repository",
]
