"""The class that a loader reads adapter_config.json with, where the loader is installed; no GPU is needed."""

import importlib
from importlib import metadata
from typing import Any


def reader(package: str, module: str, *, name: str) -> tuple[Any, str] | None:
    """Return a loader's own class for reading adapter_config.json.

    Args:
        package: the name of the loader's distribution, such as `vllm`.
        module: the module that has the class.
        name: the name of the class.

    Returns:
        The class and the distribution's version; None where it cannot be imported.
    """
    try:
        return getattr(importlib.import_module(module), name), metadata.version(package)
    except Exception:  # noqa: BLE001 - an installation that does not import is none
        return None
