"""Where llama.cpp has a module's weight, and in which order of rows and columns.

Its converter reorders some weights of the base: rows of Llama's q and k, since it rotates neighbours where
transformers rotates halves; and the value heads of Qwen3.5's linear attention, which it wants one of each key head at
a time where transformers has all of a key head together. An adapter has to follow: where the weight's rows are
reordered, B's rows are; where its columns are, A's columns. Every such order is one exchange of two axes.

It refuses modules that llama.cpp's names do not cover, and shapes that do not fit the heads of config.json.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from publisher.manifest.architectures import LLAMA_CPP

_TEXT = {"model.language_model.": "model.", "language_model.": ""}  # the text model of a multimodal class


@dataclass(frozen=True, slots=True)
class Swap:
    """An order of rows: after the first `skip`, they are seen as (outer, first, second, inner); first and second swap.

    The one that undoes it has first and second exchanged.
    """

    outer: int
    first: int
    second: int
    inner: int
    skip: int = 0

    @property
    def rows(self) -> int:
        """How many rows it orders, the skipped ones included."""
        return self.skip + self.outer * self.first * self.second * self.inner

    @property
    def undone(self) -> "Swap":
        """The order that takes it back."""
        return Swap(self.outer, self.second, self.first, self.inner, self.skip)

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the matrix (rows, any) with its rows in this order."""
        kept, moved = matrix[: self.skip], matrix[self.skip :]
        seen = moved.reshape(self.outer, self.first, self.second, self.inner * moved.shape[1])
        return torch.cat([kept, seen.transpose(1, 2).reshape(moved.shape)])


@dataclass(frozen=True, slots=True)
class Place:
    """A weight in llama.cpp: its name, and the orders of its rows and columns where they are not transformers'."""

    name: str
    rows: Swap | None = None
    columns: Swap | None = None

    def a(self, factor: torch.Tensor) -> torch.Tensor:
        """Return A (r, in) as llama.cpp has it."""
        return _columns(factor, self.columns)

    def b(self, factor: torch.Tensor) -> torch.Tensor:
        """Return B (out, r) as llama.cpp has it."""
        return factor if self.rows is None else self.rows(factor)

    @property
    def undone(self) -> "Place":
        """The same place, with the orders that take its own back."""
        return Place(self.name, *(swap and swap.undone for swap in (self.rows, self.columns)))


def _columns(matrix: torch.Tensor, swap: Swap | None) -> torch.Tensor:
    return matrix if swap is None else swap(matrix.T).T.contiguous()


def places(
    model_class: str, shapes: Mapping[str, tuple[int, ...]], *, config: Mapping[str, Any]
) -> tuple[dict[str, Place], list[str]]:
    """Find the place of each module in llama.cpp.

    Args:
        model_class: one of `LLAMA_CPP`.
        shapes: (out, in) of each module, by name.
        config: the base's config.json.

    Returns:
        The places of the modules that have one, by name, and a line for each other module that says why it has none.
    """
    text = config.get("text_config") or config
    named = _named(LLAMA_CPP[model_class], layers=text["num_hidden_layers"])
    found: dict[str, Place] = {}
    problems = []
    for module, shape in shapes.items():
        name = named(_in_text_model(module))
        if name is None or (module == "lm_head" and _is_tied(config)):
            problems.append(f"{module}: {_absence(module, name)}")
            continue
        place = Place(f"{name}.weight", *_orders(LLAMA_CPP[model_class], module, shape=shape, text=text))
        if any(swap and swap.rows != size for swap, size in zip((place.rows, place.columns), shape, strict=True)):
            problems.append(f"{module}: {shape} does not fit the heads of config.json")
        else:
            found[module] = place
    return found, problems


def _named(architecture: str, *, layers: int) -> Callable[[str], str | None]:
    """Return llama.cpp's own table of names, which the gguf package brings along."""
    import gguf

    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, layers).get_name


def _in_text_model(module: str) -> str:
    for prefix, plain in _TEXT.items():
        if module.startswith(prefix):
            return plain + module.removeprefix(prefix)
    return module


def _is_tied(config: Mapping[str, Any]) -> bool:
    return bool((config.get("text_config") or {}).get("tie_word_embeddings", config.get("tie_word_embeddings")))


def _absence(module: str, name: str | None) -> str:
    if name is not None:
        return "llama.cpp takes the embeddings for a tied head, which an adapter does not reach"
    if ".experts." in module:
        return "llama.cpp holds experts fused in one tensor"
    if "visual" in module or "vision" in module:
        return "llama.cpp keeps vision in a file of its own, to which no adapter goes"
    return "llama.cpp's table of names does not have it"


def _orders(
    architecture: str, module: str, *, shape: tuple[int, ...], text: Mapping[str, Any]
) -> tuple[Swap | None, Swap | None]:
    """Return the orders of a module's rows and columns; None where they are transformers' own."""
    if architecture == "llama":
        return _rotated(module, rows=shape[0], text=text), None
    if architecture == "qwen35" and ".linear_attn." in module:
        return _value_heads(module.rpartition(".")[2], text)
    return None, None


def _rotated(module: str, *, rows: int, text: Mapping[str, Any]) -> Swap | None:
    """Return the order of rows of Llama's q and k, where the halves of each head become neighbours."""
    heads = text["num_attention_heads"]
    by_projection = {"q_proj": heads, "k_proj": text.get("num_key_value_heads") or heads}
    count = by_projection.get(module.rpartition(".")[2])
    return None if count is None else Swap(count, 2, rows // count // 2, 1)


def _value_heads(projection: str, text: Mapping[str, Any]) -> tuple[Swap | None, Swap | None]:
    """Return the orders of Qwen3.5's linear attention.

    Value heads by key head become one of each key head at a time.
    """
    keys, values = text["linear_num_key_heads"], text["linear_num_value_heads"]
    key_width, width = text["linear_key_head_dim"], text["linear_value_head_dim"]
    each = values // keys
    heads = Swap(1, keys, each, width)
    orders: dict[str, tuple[Swap | None, Swap | None]] = {
        "in_proj_qkv": (Swap(1, keys, each, width, skip=2 * keys * key_width), None),
        "in_proj_z": (heads, None),
        "in_proj_a": (Swap(1, keys, each, 1), None),
        "in_proj_b": (Swap(1, keys, each, 1), None),
        "out_proj": (None, heads),
    }
    return orders[projection]
