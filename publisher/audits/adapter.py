"""One adapter by its two files alone, whoever made them: what PEFT and the Hub will make of it."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from publisher.audits.checks import UncheckedError, checked, needed, require_none
from publisher.border.adapterconfig import ALL_LINEAR, is_number, is_rank, reduced, targeted, wrapping
from publisher.border.limits import LIMITS
from publisher.border.patterns import Keys
from publisher.border.safetensors_header import PEFT_DTYPES
from publisher.checkpoints.files import read_json
from publisher.checkpoints.headers import TensorHeader, file_headers
from publisher.checkpoints.reading import TensorReader
from publisher.errors import FetchError, ValidationError, shown
from publisher.manifest.fields import TASK_TYPES
from publisher.manifest.schema import Variant
from publisher.records.audit import Check
from publisher.records.extraction import KEY_PREFIX, Extraction
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, EXTRACTION

_KEY = re.compile(re.escape(KEY_PREFIX) + r"(.+)\.lora_(embedding_(?=[AB]$))?([AB])(?(2)|\.weight)")
_FURTHER = re.compile(
    re.escape(KEY_PREFIX)
    + r"(.+\.lora_(magnitude_vector|diag)(\.weight)?|.+\.(lora_B\.bias|base_layer\.weight)"
    + r"|(.+\.)?(embed_tokens|lm_head)\.weight)"
)
_MATRIX = 2  # dimensions
_BLOCK = 1 << 22  # elements of a tensor that are in memory at one time


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter of a release; what is missing or cannot be read is None, and its own check says so.

    Attributes:
        path: its path in the repository, `/` or `flash/`.
        folder: where its files are.
        variant: the manifest's entry.
        config: adapter_config.json.
        headers: of every tensor of adapter_model.safetensors.
        extraction: extraction.json.
    """

    path: str
    folder: Path
    variant: Variant | None
    config: dict[str, Any] | None
    headers: dict[str, TensorHeader] | None
    extraction: Extraction | None

    @classmethod
    def read(cls, path: str, folder: Path, *, variant: Variant | None) -> Self:
        """Read whatever of an adapter can be read.

        Args:
            path: its path in the repository, `/` or `flash/`.
            folder: where its files are.
            variant: the manifest's entry; None where there is none.

        Returns:
            The adapter, with None for what is missing or cannot be read.
        """
        return cls(path, folder, variant, _config(folder), _headers(folder), _extraction(folder))

    def fields(self) -> Mapping[str, Any]:
        """Return the known fields of the configuration.

        Raises:
            UncheckedError: one of them is wrong, as the check of the configuration says.
        """
        try:
            return reduced(needed(self.config, ADAPTER_CONFIG)).fields
        except ValidationError as error:
            raise UncheckedError(error.found) from error

    def pairs(self) -> dict[str, tuple[TensorHeader, TensorHeader]]:
        """Return the headers of A and B of each module that has both, by module name; there is at least one.

        Raises:
            UncheckedError: the file cannot be read, or holds none by the names that PEFT looks for.
        """
        found: dict[str, dict[str, TensorHeader]] = {}
        for key, header in needed(self.headers, ADAPTER).items():
            if match := _KEY.fullmatch(key):
                found.setdefault(match[1], {})[match[3]] = header
        whole = {name: (halves["A"], halves["B"]) for name, halves in found.items() if len(halves) == len("AB")}
        pairs = {name: pair for name, pair in whole.items() if all(len(half.shape) == _MATRIX for half in pair)}
        return needed(pairs or None, f"pair of lora_A and lora_B in {ADAPTER}")


def _config(folder: Path) -> dict[str, Any] | None:
    try:
        return read_json(folder / ADAPTER_CONFIG)
    except FetchError:
        return None


def _headers(folder: Path) -> dict[str, TensorHeader] | None:
    try:
        return file_headers(folder / ADAPTER)
    except FetchError:
        return None


def _extraction(folder: Path) -> Extraction | None:
    try:
        return Extraction.read(folder / EXTRACTION)
    except FetchError:
        return None


def adapter_checks(adapter: Adapter) -> Iterator[Check]:
    """Yield the checks that need the adapter's two files alone."""
    claims = {"config": config, "keys": keys, "tensors": tensors, "targets": targets, "scale": scale}
    for name, claim in claims.items():
        yield checked(name, partial(claim, adapter), folder=adapter.folder, variant=adapter.path)


def config(adapter: Adapter) -> str:
    """Check that adapter_config.json holds what PEFT needs, in the types that the Hub accepts."""
    found = read_json(adapter.folder / ADAPTER_CONFIG)
    wanted = {
        "peft_type": (found.get("peft_type") == "LORA", "'LORA'"),
        "task_type": (found.get("task_type") in (None, *TASK_TYPES), f"null, or one of {', '.join(TASK_TYPES)}"),
        "base_model_name_or_path": (_is_text(found.get("base_model_name_or_path")), "the base's repository id"),
        "r": (is_rank(found.get("r")), f"a whole number above zero, at most {LIMITS.rank:,}"),
        "lora_alpha": (is_number(found.get("lora_alpha")), "a number"),
        "rank_pattern": (_is_pattern(found.get("rank_pattern")), "numbers by module"),
        "alpha_pattern": (_is_pattern(found.get("alpha_pattern")), "numbers by module"),
    }
    require_none([f"{f} is {shown(found.get(f))}; expected {what}" for f, (holds, what) in wanted.items() if not holds])
    left_out = reduced(found).left_out
    base, revision = found["base_model_name_or_path"], found.get("revision")
    pin = f"at {revision}" if revision else "no base revision pinned"
    told = f"LoRA, {found.get('task_type') or 'no task type'}, base {base}" + (f" {pin}" if revision else f", {pin}")
    return told + (f"; kept from PEFT here: {', '.join(left_out)}" if left_out else "")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_pattern(value: object) -> bool:
    return value is None or (isinstance(value, dict) and all(map(is_number, value.values())))


def keys(adapter: Adapter) -> str:
    """Check that every tensor goes by the name that PEFT looks for, and has its other half."""
    headers = file_headers(adapter.folder / ADAPTER)
    halves = {(match[1], match[3]) for key in headers if (match := _KEY.fullmatch(key))}
    further = [key for key in headers if _is_further(key, adapter.config or {})]
    problems = [_complaint(key) for key in headers if not _KEY.fullmatch(key) and key not in further]
    problems += [
        f"{name} has lora_{half} and no lora_{other}"
        for name, half in sorted(halves)
        for other in "AB"
        if (name, other) not in halves
    ]
    require_none([*problems, *(["there is no lora_A or lora_B in the file"] if not halves and not problems else [])])
    besides = f"; {len(further)} further tensors, not looked into" if further else ""
    return f"{len(halves)} tensors below {KEY_PREFIX}{besides}"


def _complaint(key: str) -> str:
    if not key.startswith(KEY_PREFIX):
        return f"{key} does not begin with {KEY_PREFIX}, and PEFT will not find it"
    return f"{key} is no key of a LoRA's tensor, and PEFT will drop it"


def _is_further(key: str, found: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of another kind that the configuration announces."""
    whole = found.get("modules_to_save") or found.get("trainable_token_indices") or found.get("bias", "none") != "none"
    return _FURTHER.fullmatch(key) is not None or (key.startswith(KEY_PREFIX) and bool(whole) and "lora_" not in key)


def tensors(adapter: Adapter) -> str:
    """Check that A and B of each module are matrices that fit together, of finite numbers that are not all zero."""
    headers = needed(adapter.headers, ADAPTER)
    factors = {key: header for key, header in headers.items() if _KEY.fullmatch(key)}
    require_none([complaint for key, header in factors.items() for complaint in _header_complaints(key, header)])
    pairs, problems = adapter.pairs(), []
    for name, (a, b) in pairs.items():
        if a.shape[0] != b.shape[1]:
            problems.append(f"{name}: A has {a.shape[0]} rows and B {b.shape[1]} columns")
        if a.dtype != b.dtype:
            problems.append(f"{name}: A is in {a.dtype} and B in {b.dtype}")
    size = sum(header.stop - header.start for header in factors.values())
    if size > LIMITS.adapter_bytes:
        problems.append(f"{ADAPTER} holds {size:,} bytes of factors; at most {LIMITS.adapter_bytes:,} are read")
    require_none(problems)
    with TensorReader(headers) as reader:
        for key in factors:
            problems += _complaints(key.removeprefix(KEY_PREFIX).removesuffix(".weight"), reader.blocks(key, _BLOCK))
    require_none(problems)
    dtypes = sorted({header.dtype for header in factors.values()})
    return f"{len(factors)} tensors in {', '.join(dtypes)}, finite, none all zero"


def _header_complaints(key: str, header: TensorHeader) -> Iterator[str]:
    if len(header.shape) != _MATRIX:
        yield f"{key} has {len(header.shape)} dimensions; a factor is a matrix"
    elif 0 in header.shape:
        yield f"{key} is empty: its shape is {list(header.shape)}"
    if header.dtype not in PEFT_DTYPES:
        yield f"{key} is in {header.dtype}; a factor is in one of {', '.join(sorted(PEFT_DTYPES))}"


def _complaints(name: str, blocks: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yield what is wrong with a tensor's values; a block of it is in memory at a time, however large it is."""
    something = False
    for block in blocks:
        if not bool(torch.isfinite(block).all()):
            yield f"{name} holds NaN or infinity"
            return
        something = something or bool(block.any())
    if not something:
        yield f"{name} is all zero: the module changes nothing"


def targets(adapter: Adapter) -> str:
    """Check that target_modules selects every module of the file by PEFT's own rule, and names none that it lacks."""
    fields, pairs = adapter.fields(), adapter.pairs()
    wrappers = wrapping(fields, pairs)
    modules = [name for name in pairs if name not in wrappers]
    wanted = fields.get("target_modules")
    if wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR):
        raise UncheckedError(f"target_modules is {shown(wanted)}: which modules that is depends on the base")
    tied = bool(
        fields.get("ensure_weight_tying")
    )  # PEFT then adapts what shares a weight, too: that is seen on loading
    selected = set(modules if tied else targeted(fields, modules))
    entries = [entry for entry in wanted if targeted(fields, [entry])] if isinstance(wanted, list) else []
    ends = {name[at:] for name in modules for at in (0, *(place + 1 for place, sign in enumerate(name) if sign == "."))}
    require_none(
        [f"{name} is in the file and target_modules does not select it" for name in modules if name not in selected]
        + [f"{entry} is in target_modules and no module of the file is meant" for entry in entries if entry not in ends]
        + _unwrapped(fields.get("target_parameters") or (), wrappers)
    )
    parameters = f"; {len(wrappers)} parameters by target_parameters" if wrappers else ""
    return f"{len(modules)} modules, each selected by target_modules, which names no other{parameters}"


def _unwrapped(entries: Sequence[str], wrappers: Mapping[str, Sequence[str]]) -> list[str]:
    """Return what is wrong between target_parameters and the wrappers of the file: each module has one for each."""
    parameters = {parameter for found in wrappers.values() for parameter in found}
    problems = [
        f"{entry} is in target_parameters and no tensor of the file is meant"
        for entry in entries
        if not any(f".{parameter}".endswith(f".{entry}") for parameter in parameters)
    ]
    for name, found in wrappers.items():
        outer = name.replace(".base_layer", "")
        nested = {outer + ".base_layer" * depth for depth in range(len(found))}
        if lost := sorted(nested - wrappers.keys()):
            problems.append(f"{outer} has {len(found)} parameters in target_parameters, and the file lacks {lost[0]}")
    return list(dict.fromkeys(problems))


def scale(adapter: Adapter) -> str:
    """Check that the ranks are those of the tensors, and that no forgotten pattern scales a module otherwise."""
    found, modules = adapter.fields(), adapter.pairs()
    ranks, alphas = (found.get(field, {}) for field in ("rank_pattern", "alpha_pattern"))
    rank_keys, alpha_keys = (Keys(list(patterns)) for patterns in (ranks, alphas))
    scales: Counter[float] = Counter()
    problems = []
    wrappers = wrapping(found, modules)
    for name, parameters in wrappers.items():
        columns = modules[name][1].shape[1]
        pairs = [
            (_value(ranks, one, found.get("r")), _value(alphas, one, found.get("lora_alpha"))) for one in parameters
        ]
        fitting = [(rank, alpha) for rank, alpha in pairs if rank and alpha is not None and columns % rank == 0]
        if not fitting:
            problems.append(f"{name}: its {columns} columns are no whole number of experts at rank {pairs[0][0]}")
            continue
        scales[min(_scale(rank, alpha, found) for rank, alpha in fitting)] += 1
    for name, (_, b) in modules.items():
        if name in wrappers:
            continue
        rank = ranks.get(rank_keys.key_for(name), found.get("r"))
        alpha = alphas.get(alpha_keys.key_for(name), found.get("lora_alpha"))
        if rank is None or alpha is None:
            raise UncheckedError(f"{ADAPTER_CONFIG} gives no rank and alpha for {name}")
        if rank != b.shape[1]:
            problems.append(f"{name}: the config gives rank {rank}, the tensors have {b.shape[1]}")
        scales[_scale(rank, alpha, found)] += 1
    told = ", ".join(f"{value:g} in {count} modules" for value, count in sorted(scales.items()))
    if len(scales) > 1 and ranks and not alphas and adapter.extraction is not None:
        problems.append(f"rank_pattern without alpha_pattern: PEFT scales by {told}")
    require_none(problems)
    return f"the ranks are the tensors'; scale {told}"


def _value(patterns: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    key = Keys(list(patterns)).key_for(name)
    return otherwise if key is None else patterns[key]


def _scale(rank: int, alpha: float, fields: Mapping[str, Any]) -> float:
    return float(alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank))
