"""A manifest as a value: it is read without torch and without the network."""

from pathlib import Path

from publisher.api.border import causes_explained
from publisher.manifest.reading import load_manifest as read_one
from publisher.manifest.schema import Manifest


def load_manifest(path: str | Path) -> Manifest:
    """Read one manifest, without any network access.

    Args:
        path: the YAML file.

    Returns:
        The manifest, frozen and checked as `publish check` does.

    Raises:
        ManifestError: the file is no manifest; every problem is named on a line of its own.

    Example:
        >>> publisher.load_manifest("manifests/demo.yaml").repo
        'demo/clef-lora'
    """
    with causes_explained():
        return read_one(Path(path))
