"""Manifests for small pairs: one variant at the root, from local folders."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import yaml

ADAPTER: Mapping[str, Any] = MappingProxyType(
    {"method": "svd", "rank": "auto", "dtype": "float32", "layout": "pattern", "task_type": "CAUSAL_LM"}
)


def one_variant(repo: str, *, label: str, source: str, base: str, card: Mapping[str, str], **fields: Any) -> str:
    """The text of a manifest for a Llama; `fields` are more of the variant's, `card` has title and summary."""
    variant = {
        "path": "/",
        "label": label,
        "source": {"path": source},
        "base": {"path": base},
        "model_class": "LlamaForCausalLM",
        "adapter": dict(ADAPTER),
    }
    whole = {"version": 1, "repo": repo, "license": "mit", "variants": [variant | fields]}
    return yaml.safe_dump(whole | {"card": {"template": "lora_card.md.j2"} | dict(card)})
