"""What a loader reads adapter_config.json with, where the loader is installed: that takes no engine and no GPU."""

import importlib
from importlib import metadata
from typing import Any


def reader(package: str, module: str, *, name: str) -> tuple[Any, str] | None:
    """The class `name` of the package's module, and the package's version; None where it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name), metadata.version(package)
    except Exception:  # noqa: BLE001 - an installation that does not import is none
        return None
