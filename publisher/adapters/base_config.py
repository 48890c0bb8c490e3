"""Where the base's config.json is: all that a model without weights needs of the base."""

from pathlib import Path

from publisher.checkpoints.files import MODEL_CONFIG
from publisher.hub import client as hub
from publisher.manifest.schema import Variant


def base_config(variant: Variant) -> Path:
    """Return the folder with the base's config.json; of a repository, nothing else is fetched.

    Raises:
        HubError: the Hub cannot be reached, or has no such file.
    """
    base = variant.base
    if base.path is not None:
        return Path(base.path).resolve()
    return hub.download(base.repo or "", base.revision or "", filename=MODEL_CONFIG).parent
