"""What is judged: an adapter's configuration and the header of its tensors, and what is known of its base.

The weights are not needed, of the adapter no more than whether B is all zero: the base's class is built on the meta
device from config.json. Refused are a folder that holds no adapter, and a base whose class transformers does not have.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from publisher.adapters.peft_files import KEY_PREFIX
from publisher.border.adapterconfig import reduced
from publisher.border.limits import LIMITS
from publisher.border.patterns import Keys
from publisher.border.safetensors_header import PEFT_DTYPES
from publisher.checkpoints.files import read_config, read_json
from publisher.checkpoints.headers import TensorHeader, file_headers
from publisher.checkpoints.reading import TensorReader
from publisher.errors import FetchError, ValidationError
from publisher.extraction.model_structure import Structure, structure_of
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXPORTS, EXTRACTION

_HALF = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_MATRIX = (2, 5)  # dimensions: of a matrix, and of a convolution's factor at the most
_BLOCK = 1 << 22  # elements of a tensor that are in memory at one time
_DEFAULT = 8  # PEFT's own rank and alpha
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Pair:
    """The shapes of a module's two factors: A is (rank, in), B (out, rank); None for a half that is missing."""

    a: tuple[int, ...] | None
    b: tuple[int, ...] | None

    @property
    def rank(self) -> int:
        """By the tensors, not by the configuration."""
        return self.b[-1] if self.b else self.a[0] if self.a else 0


@dataclass(frozen=True)
class Base:
    """What is known of the base: config.json in its folder, and the class that the adapter is for."""

    folder: Path
    model_class: str

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return read_config(self.folder)

    @cached_property
    def structure(self) -> Structure:
        """The modules of the class."""
        return structure_of(self.model_class, self.folder)

    @property
    def architecture(self) -> str:
        """The class that other loaders go by."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        return first if isinstance(first, str) else self.model_class

    @property
    def text(self) -> Mapping[str, Any]:
        """The settings of the language model."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


@dataclass(frozen=True)
class Subject:
    """An adapter and its base.

    Attributes:
        folder: where the adapter's two files are.
        config: adapter_config.json.
        headers: of every tensor of adapter_model.safetensors.
        base: its base.
        unscaled: an extraction.json beside it says that the scale is 1 in every module, whatever the configuration.
        subfolder: where it is in its repository; empty at the root.
        exports: the formats of other loaders in which it lies beside the PEFT files too.
    """

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    base: Base
    unscaled: bool = False
    subfolder: str = ""
    exports: frozenset[str] = frozenset()

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """The factors by module, for every tensor that is called lora_A or lora_B, whatever stands before it."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, header in self.headers.items():
            if match := _HALF.fullmatch(key):
                found.setdefault(match[1].removeprefix(KEY_PREFIX), {})[match[2]] = header.shape
        return {name: Pair(halves.get("A"), halves.get("B")) for name, halves in found.items()}

    @cached_property
    def doubled(self) -> list[str]:
        """The keys of factors that another key of the file names too: with `default`, or without PEFT's prefix."""
        seen: set[tuple[str, str]] = set()
        found = []
        for key in self.headers:
            if match := _HALF.fullmatch(key):
                half = (match[1].removeprefix(KEY_PREFIX), match[2])
                found += [key] if half in seen else []
                seen.add(half)
        return found

    @cached_property
    def zeros(self) -> frozenset[str]:
        """The modules whose B holds nothing but zeros; reading stops at the first other number."""
        with TensorReader(self.headers) as reader:
            halves = {key: match[1] for key in self.headers if (match := _HALF.fullmatch(key)) and match[2] == "B"}
            idle = [key for key in halves if not any(bool(block.any()) for block in reader.blocks(key, _BLOCK))]
        return frozenset(halves[key].removeprefix(KEY_PREFIX) for key in idle)

    @property
    def named(self) -> list[str]:
        """The factors whose key holds the adapter's name, as PEFT never writes it to a file."""
        return [key for key in self.headers if _HALF.fullmatch(key) and ".default." in key]

    @property
    def beyond(self) -> list[str]:
        """The modules in layers that the base lacks."""
        layers = self.base.text.get("num_hidden_layers")
        found = {name: _LAYER.search(f".{name}") for name in self.pairs}
        return [name for name, match in found.items() if match and isinstance(layers, int) and int(match[1]) >= layers]

    @property
    def others(self) -> list[str]:
        """The tensors that are no factor of a module."""
        return [key for key in self.headers if not _HALF.fullmatch(key)]

    @property
    def rank(self) -> int:
        """The largest, by configuration and tensors."""
        named: list[int] = [self.config.get("r") or 0, *(self.config.get("rank_pattern") or {}).values()]
        return max([*named, *(pair.rank for pair in self.pairs.values())])

    def scale_by_peft(self, name: str) -> float:
        """PEFT's rule, which the format belongs to: alpha / r, or alpha / sqrt(r), with the patterns of both."""
        _, alphas = self._keys
        rank = self.config_rank(name)
        alpha = _value(self.config, "alpha_pattern", key=alphas.key_for(name), default="lora_alpha")
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def config_rank(self, name: str) -> float:
        """Return the rank that adapter_config.json gives the module."""
        return _value(self.config, "rank_pattern", key=self._keys[0].key_for(name), default="r")

    @cached_property
    def _keys(self) -> tuple[Keys, Keys]:
        """Of rank_pattern and alpha_pattern."""
        ranks, alphas = (Keys(list(self.config.get(field) or {})) for field in ("rank_pattern", "alpha_pattern"))
        return ranks, alphas

    def scale(self, name: str) -> float:
        """The one that is meant."""
        return 1.0 if self.unscaled else self.scale_by_peft(name)


def read_subject(folder: Path, base: Base, *, subfolder: str = "") -> Subject:
    """The adapter in this folder.

    Raises:
        FetchError: its files are missing or cannot be read, or hold no factors, or what is none.
        ValidationError: adapter_config.json is not for LoRA, or a known field holds what PEFT cannot take.
    """
    unscaled = (folder / EXTRACTION).is_file()
    config, headers = read_json(folder / ADAPTER_CONFIG), file_headers(folder / ADAPTER)
    reduced(config)  # for its checks: whatever reads a known field finds it in its type
    exports = [name for name, files in EXPORTS.items() if unscaled and all((folder / file).is_file() for file in files)]
    subject = Subject(folder, config, headers, base, unscaled, subfolder, frozenset(exports))
    if not subject.pairs:
        raise FetchError(f"{folder / ADAPTER} holds no lora_A and no lora_B", expected="a LoRA adapter of PEFT")
    if odd := next((complaint for key in headers if (complaint := factor_complaint(key, headers[key]))), ""):
        raise FetchError(
            f"{folder / ADAPTER}: {odd}", expected="factors that are matrices", next_step="extract the adapter again"
        )
    size = (folder / ADAPTER).stat().st_size
    if size > LIMITS.adapter_bytes:
        raise FetchError(
            f"{folder / ADAPTER} has {size:,} bytes", expected=f"an adapter of at most {LIMITS.adapter_bytes:,} bytes"
        )
    return subject


def factor_complaint(key: str, header: TensorHeader) -> str:
    """Return what keeps a tensor from being a factor, by its header alone; nothing for those that are none by name."""
    if _HALF.fullmatch(key) is None:
        return ""
    if header.dtype not in PEFT_DTYPES:
        return f"{key} is in {header.dtype}, which is no floating-point format that PEFT computes in"
    if not _MATRIX[0] <= len(header.shape) <= _MATRIX[1] or 0 in header.shape:
        return f"{key} has the shape {list(header.shape)}"
    return ""


def class_for(config: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """The class that an adapter without a manifest is for: as its configuration says, or as the base was saved.

    Raises:
        ValidationError: transformers has none of them.
    """
    import transformers

    mapping, saved = config.get("auto_mapping"), base.get("architectures")
    named = [mapping.get("base_model_class")] if isinstance(mapping, dict) else []
    named += saved if isinstance(saved, list) else []
    known = [name for name in named if isinstance(name, str) and hasattr(transformers, name)]
    if not known:
        raise ValidationError(
            f"transformers {transformers.__version__} has no class {' or '.join(map(str, filter(None, named)))}",
            expected="a base whose config.json names a class of transformers",
            next_step="pip install --upgrade transformers, or name the base's folder with --base",
        )
    return known[0]


def _value(config: Mapping[str, Any], field: str, *, key: str | None, default: str) -> float:
    """Return what a module has by its key in the patterns, or else by the default's field, or else by PEFT itself."""
    found = config.get(default, _DEFAULT) if key is None else config[field][key]
    return float(_DEFAULT if found is None else found)
