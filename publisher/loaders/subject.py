"""What is judged: an adapter's configuration and the header of its tensors, and what is known of its base.

No weights are needed but to see whether a B is all zero: the base's class is built on the meta device from config.json.
It refuses a folder that holds no adapter, and a base whose class transformers does not have.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from publisher.adapters.initialisation import Initialised, initialised
from publisher.adapters.loading import parameter_places
from publisher.border.adapterconfig import reduced, wrapping
from publisher.border.limits import LIMITS
from publisher.border.patterns import Keys
from publisher.border.safetensors_header import PEFT_DTYPES
from publisher.checkpoints.files import read_config, read_json
from publisher.checkpoints.headers import TensorHeader, file_headers
from publisher.checkpoints.reading import TensorReader
from publisher.errors import FetchError, UncheckablePatternError, ValidationError
from publisher.extraction.model_structure import Structure, structure_of
from publisher.loaders.packing import LAYOUT, told_packing
from publisher.numerics.packing import Told
from publisher.records.extraction import KEY_PREFIX
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXPORTS, EXTRACTION

_HALF = re.compile(r"(.+)\.lora_(embedding_(?=[AB](?:\.default)?$))?([AB])(?:\.default)?(?(2)|\.weight)")
_MATRIX = (2, 5)  # dimensions: of a matrix, and of a convolution's factor at the most
_BLOCK = 1 << 22  # elements of a tensor that are in memory at one time
_DEFAULT = 8  # PEFT's own rank and alpha
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class FactorShapes:
    """The shapes of a module's two factors; None for one that is missing.

    Attributes:
        a: shape of lora_A, (rank, in).
        b: shape of lora_B, (out, rank).
    """

    a: tuple[int, ...] | None
    b: tuple[int, ...] | None

    @property
    def rank(self) -> int:
        """The rank that the tensors have, whatever the configuration says."""
        if self.b:
            return self.b[1]
        return self.a[0] if self.a else 0


@dataclass(frozen=True)
class Base:
    """What is known of the base.

    Attributes:
        folder: the folder that holds its config.json.
        model_class: name of the class in transformers that the adapter is for.
    """

    folder: Path
    model_class: str

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of the base's config.json."""
        return read_config(self.folder)

    @cached_property
    def structure(self) -> Structure:
        """The modules that the class has."""
        return structure_of(self.model_class, self.folder)

    @property
    def architecture(self) -> str:
        """The name of the class that other loaders go by."""
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
        folder: the folder of the adapter's two files.
        config: the content of adapter_config.json.
        headers: the header of every tensor of adapter_model.safetensors, by name.
        base: what is known of the base.
        unscaled: an extraction.json beside it says that the scale is 1 in every module, whatever the configuration.
        subfolder: the adapter's folder in its repository; empty at the root.
        exports: the formats of other loaders that lie beside the PEFT files too.
        source: the folder of the merged fine-tune that the adapter is said to be in, where it is at hand.
    """

    folder: Path
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    base: Base
    unscaled: bool = False
    subfolder: str = ""
    exports: frozenset[str] = frozenset()
    source: Path | None = None

    @cached_property
    def factors(self) -> dict[str, FactorShapes]:
        """The shapes of the factors by module, of every tensor called lora_A or lora_B, whatever its prefix."""
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, header in self.headers.items():
            if match := _HALF.fullmatch(key):
                found.setdefault(match[1].removeprefix(KEY_PREFIX), {})[match[3]] = header.shape
        return {name: FactorShapes(halves.get("A"), halves.get("B")) for name, halves in found.items()}

    @cached_property
    def wrapped(self) -> Mapping[str, tuple[str, ...]]:
        """The modules of the file that are PEFT's wrappers of parameters, with the parameters that each may wrap."""
        try:
            return wrapping(self.config, self.factors)
        except UncheckablePatternError:  # of whatever module has such a parameter: those that nest, and their holders
            holders = {name.replace(".base_layer", "") for name in self.factors if ".base_layer" in name}
            return {name: () for name in self.factors if name.replace(".base_layer", "") in holders}

    @property
    def headers_of_modules(self) -> dict[str, TensorHeader]:
        """The headers without the factors of parameters."""
        halves = {key: _HALF.fullmatch(key) for key in self.headers}
        wrapped = {key for key, half in halves.items() if half and half[1].removeprefix(KEY_PREFIX) in self.wrapped}
        return {key: header for key, header in self.headers.items() if key not in wrapped}

    @cached_property
    def repeated(self) -> list[str]:
        """The keys of factors that another key of the file names too: with `default`, or without PEFT's prefix."""
        seen: set[tuple[str, str]] = set()
        found = []
        for key in self.headers:
            if match := _HALF.fullmatch(key):
                half = (match[1].removeprefix(KEY_PREFIX), match[3])
                found += [key] if half in seen else []
                seen.add(half)
        return found

    @cached_property
    def zero_factors(self) -> frozenset[str]:
        """The modules of which one factor holds nothing but zeros; reading stops at the first other number."""
        zero = set()
        with TensorReader(self.headers) as reader:
            for key in self.headers:
                match = _HALF.fullmatch(key)
                if match and not any(bool(block.any()) for block in reader.blocks(key, _BLOCK)):
                    zero.add(match[1].removeprefix(KEY_PREFIX))
        return frozenset(zero)

    @cached_property
    def initialised(self) -> Initialised:
        """What the adapter's initialisation means for the base."""
        return initialised(self.config)

    @cached_property
    def packing(self) -> Told | None:
        """How the factors of stacked experts are packed; None where there are none, or they are this tool's own."""
        entries = self.config.get("target_parameters")
        if self.unscaled or not entries:
            return None
        places = parameter_places(self.base.model_class, entries, config=self.base.folder)
        both = (self.base.folder, self.source) if self.source else None
        return told_packing(self.headers, places, stated=self.config.get(LAYOUT), names=self.base.structure, both=both)

    @property
    def changes_otherwise(self) -> bool:
        """Whether it can change the model by more than its factors: by whole tensors, or by its initialisation."""
        tables = tuple(f".{name}.base_layer.weight" for name in ("embed_tokens", "lm_head"))
        return self.initialised.changes_base or any(not key.endswith(tables) for key in self.other_tensors)

    @property
    def with_adapter_name(self) -> list[str]:
        """The factors whose key holds the adapter's name, as PEFT never writes it to a file."""
        return [key for key in self.headers if _HALF.fullmatch(key) and ".default" in key.rpartition(".lora_")[2]]

    @property
    def beyond_base(self) -> list[str]:
        """The modules in layers that the base lacks."""
        layers = self.base.text.get("num_hidden_layers")
        found = {name: _LAYER.search(f".{name}") for name in self.factors}
        return [name for name, match in found.items() if match and isinstance(layers, int) and int(match[1]) >= layers]

    @property
    def other_tensors(self) -> list[str]:
        """The tensors that are no factor of a module."""
        return [key for key in self.headers if not _HALF.fullmatch(key)]

    @property
    def rank(self) -> int:
        """The largest rank, by configuration and tensors."""
        configured: list[int] = [self.config.get("r") or 0, *(self.config.get("rank_pattern") or {}).values()]
        tensors = (factors.rank for name, factors in self.factors.items() if name not in self.wrapped)
        return max([*configured, *tensors])

    def scale_by_peft(self, name: str) -> float:
        """Return a module's scale by the rule of PEFT, whose format this is.

        It is alpha / r, or with use_rslora alpha / sqrt(r) (https://arxiv.org/abs/2312.03732); both have patterns.
        """
        rank = self.config_rank(name)
        alpha = _value(self.config, "alpha_pattern", key=self._key(1, name), default="lora_alpha")
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def config_rank(self, name: str) -> float:
        """Return the rank that adapter_config.json gives the module, or the parameter that it wraps."""
        return _value(self.config, "rank_pattern", key=self._key(0, name), default="r")

    def _key(self, field: int, name: str) -> str | None:
        """Return the key of rank_pattern (0) or alpha_pattern (1) that a module or a wrapped parameter has."""
        keys = self._keys[field]
        found = [keys.key_for(one) for one in self.wrapped.get(name) or (name,)]
        return next((key for key in found if key is not None), None)

    @cached_property
    def _keys(self) -> tuple[Keys, Keys]:
        """The keys of rank_pattern and those of alpha_pattern."""
        ranks, alphas = (Keys(list(self.config.get(field) or {})) for field in ("rank_pattern", "alpha_pattern"))
        return ranks, alphas

    def scale(self, name: str) -> float:
        """Return the scale that is meant for the module."""
        return 1.0 if self.unscaled else self.scale_by_peft(name)


def read_subject(folder: Path, base: Base, *, subfolder: str = "", source: Path | None = None) -> Subject:
    """Read the adapter in a folder, and check it.

    Args:
        folder: the folder with adapter_config.json and adapter_model.safetensors.
        base: what is known of its base.
        subfolder: the adapter's folder in its repository; empty at the root.
        source: the folder of the merged fine-tune, where it is at hand.

    Returns:
        The adapter with its base, ready to be judged.

    Raises:
        FetchError: its files are missing or cannot be read, or hold no factors, or what is none.
        ValidationError: adapter_config.json is not for LoRA, or a known field holds what PEFT cannot take.
    """
    unscaled = (folder / EXTRACTION).is_file()
    config = read_json(folder / ADAPTER_CONFIG)
    headers = file_headers(folder / ADAPTER)
    reduced(config)  # for its checks: whatever reads a known field finds it in its type
    exports = [name for name, files in EXPORTS.items() if unscaled and all((folder / file).is_file() for file in files)]
    subject = Subject(folder, config, headers, base, unscaled, subfolder, frozenset(exports), source)
    if not subject.factors:
        raise FetchError(f"{folder / ADAPTER} holds no lora_A and no lora_B", expected="a LoRA adapter of PEFT")
    require_readable(folder / ADAPTER, headers)
    return subject


def require_readable(file: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Raise an error where a tensor that is a factor by its name can be none, or the file is too large.

    Raises:
        FetchError: naming the tensor, or the size.
    """
    complaints = [factor_complaint(key, header) for key, header in headers.items()]
    odd = next(filter(None, complaints), "")
    if odd:
        raise FetchError(f"{file}: {odd}", expected="factors that are matrices", next_step="extract the adapter again")
    size = file.stat().st_size
    if size > LIMITS.adapter_bytes:
        raise FetchError(f"{file} has {size:,} bytes", expected=f"an adapter of at most {LIMITS.adapter_bytes:,} bytes")


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
    """Return the name of the class that an adapter without a manifest is for.

    Its own configuration decides, or else the class that the base was saved as.

    Args:
        config: the content of adapter_config.json.
        base: the content of the base's config.json.

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
