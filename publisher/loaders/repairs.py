"""What can be repaired in an adapter without guessing: one pure function for each defect, on names and configuration.

A repair is certain where the file and the base's class leave one meaning: every name that is changed becomes that of a
module of the class, every number stays what it is, and what PEFT computes of the factors does not depend on a choice
made here. `REPAIRS` is the table, in the order in which they are tried; `numbers` comes before them, since the
configuration cannot be checked earlier. The packing of experts, which takes the numbers themselves, is for `repairing`.
Begin with `Draft`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Final

from publisher.adapters.loading import parameter_places
from publisher.adapters.wrappers import ExpertPlace
from publisher.border.adapterconfig import ALL_LINEAR, is_rank, targeted, wrapping
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import PatternError, ValidationError, counted
from publisher.loaders.subject import Base
from publisher.numerics.packing import Packing
from publisher.records.extraction import KEY_PREFIX


@dataclass(frozen=True)
class Draft:
    """An adapter as it is to be written.

    Attributes:
        config: the content of adapter_config.json.
        headers: of each tensor where it lies now, by the key that it gets.
        packing: how the factors of experts are packed now, where that is to be PEFT's; None where they stay.
        places: of the parameters whose factors are packed anew.
    """

    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]
    packing: Packing | None = None
    places: Mapping[str, ExpertPlace] = field(default_factory=dict)


Repair = Callable[[Draft, Base], tuple[Draft, str] | None]
"""Returns the draft without the defect, and what was changed in words; None where there is no such defect."""

_WRAPPERS = re.compile(r"^(?:base_model\.model\.|base_model\.|_orig_mod\.|module\.)+")
_OF_ADAPTER = re.compile(r"\.(?:lora_\w+|token_adapter|modules_to_save)(?:\..*)?$")
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")
_NAMED = re.compile(r"(\.lora_\w+)\.(?!weight$|bias$)([\w-]+)(?=\.weight$|\.bias$|$)")
_NUMBERS: Final = ("r", "lora_alpha")
_PATTERNS: Final = ("rank_pattern", "alpha_pattern")
_SELECTING: Final = ("layers_to_transform", "layers_pattern", "exclude_modules")
_NESTED: Final = 4  # parameters of one module whose order is looked into


# --- the configuration ----------------------------------------------------------------------------------------


def numbers(draft: Draft, _: Base) -> tuple[Draft, str] | None:
    """Write as numbers what adapter_config.json has as text, or as 8.0 where PEFT takes whole ones."""
    changed = {name: _number(draft.config[name]) for name in _NUMBERS if name in draft.config}
    for name in _PATTERNS:
        if isinstance(found := draft.config.get(name), dict):
            changed[name] = {key: _number(value) for key, value in found.items()}
    changed = {name: value for name, value in changed.items() if repr(value) != repr(draft.config[name])}
    if not changed:
        return None
    return _with_config(draft, changed), f"numbers that were text, or no whole ones, in {', '.join(changed)}"


def _number(value: object) -> object:
    """Return the number that a text or a float stands for; whatever else it is, as it is."""
    if isinstance(value, str) and re.fullmatch(r"\d{1,12}(\.0*)?", value, re.ASCII):
        value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def dropout(draft: Draft, _: Base) -> tuple[Draft, str] | None:
    """Set lora_dropout to 0 beside target_parameters: it counts in training alone, and PEFT refuses it there."""
    if not draft.config.get("target_parameters") or not draft.config.get("lora_dropout"):
        return None
    return _with_config(draft, {"lora_dropout": 0.0}), "lora_dropout is 0: PEFT refuses another beside parameters"


def orientation(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Set fan_in_fan_out to false beside target_parameters, where no module is stored transposed: PEFT refuses it."""
    modules = _modules(draft)
    if not draft.config.get("target_parameters") or not draft.config.get("fan_in_fan_out"):
        return None
    if modules & base.structure.transposed:
        return None
    return _with_config(draft, {"fan_in_fan_out": False}), "fan_in_fan_out is false: no module of the file is so stored"


def pattern_keys(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Give keys of rank_pattern and alpha_pattern the names by which PEFT looks for them, where they have a key's.

    A rank must then be the one of that module's tensors, or nothing is changed.
    """
    every = base.structure.every | base.structure.wrappable.keys()
    changed: dict[str, dict[str, Any]] = {}
    for name in _PATTERNS:
        found = draft.config.get(name) or {}
        keys = {key: _OF_ADAPTER.sub("", _WRAPPERS.sub("", key)).removesuffix(".weight") for key in found}
        keys = {key: new for key, new in keys.items() if new == key or new in every}
        if len(set(keys.values())) == len(found) and any(new != key for key, new in keys.items()):
            changed[name] = {new: found[key] for key, new in keys.items()}
    ranks = {module: rank for module, rank in changed.get("rank_pattern", {}).items() if module in _modules(draft)}
    if not changed or any(_rank(draft, module) not in (None, rank) for module, rank in ranks.items()):
        return None
    told = " and ".join(changed)
    return _with_config(draft, changed), f"keys of {told} are names of modules, without what a tensor's name adds"


def targets(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Write into target_modules just the modules of the file.

    One that it names and the file lacks would be adapted with a B of zeros, which changes nothing. One that the file
    has and target_modules does not select would be dropped. All must be modules of the class, in its sizes.
    """
    wanted = draft.config.get("target_modules")
    modules = _modules(draft)
    everything = wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR)
    tied = draft.config.get("ensure_weight_tying") or draft.config.get("layer_replication")
    if everything or tied or not all(_fits(draft, module, base) for module in modules):
        return None
    adaptable = base.structure.linear | base.structure.transposed | base.structure.tables
    try:
        selected = set(targeted(draft.config, sorted(adaptable | modules)))
    except PatternError:
        return None
    lost, idle = modules - selected, selected - modules
    if not lost and not idle:
        return None
    parts = [f"{counted(len(lost), 'module')} of the file added to target_modules"] if lost else []
    parts += [f"{counted(len(idle), 'module')} without factors in the file taken out of target_modules"] if idle else []
    fields = {"target_modules": sorted(modules)} | {name: None for name in _SELECTING if name in draft.config}
    return _with_config(draft, fields), ", ".join(parts)


def _fits(draft: Draft, module: str, base: Base) -> bool:
    """Return whether the class has such a linear module, in the sizes of both factors."""
    a, b = (draft.headers.get(f"{KEY_PREFIX}{module}.lora_{half}.weight") for half in "AB")
    shape = base.structure.shapes.get(module)
    if a is None or b is None or shape is None or len(a.shape) != len(shape) or len(b.shape) != len(shape):
        return False
    return (b.shape[0], a.shape[1]) == shape and a.shape[0] == b.shape[1]


# --- the keys -------------------------------------------------------------------------------------------------


def prefixes(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Give every tensor PEFT's prefix and the full name of its module, where exactly one module can be meant."""

    def known(name: str) -> bool:
        return _module(name) in base.structure.every

    found: dict[str, str] = {}
    for key in draft.headers:
        if key.startswith(KEY_PREFIX) and known(key.removeprefix(KEY_PREFIX)):
            continue
        rest = _WRAPPERS.sub("", key)
        inside = f"{base.structure.names.prefix}."
        spellings = {rest, f"{inside}{rest}", rest.removeprefix(inside)}
        meant = [name for name in sorted(spellings) if known(name)]
        if len(meant) != 1:
            return None
        found[key] = f"{KEY_PREFIX}{meant[0]}"
    return _renamed(draft, found, told="names begin as PEFT's do")


def adapter_names(draft: Draft, _: Base) -> tuple[Draft, str] | None:
    """Take the adapter's name out of the keys, which PEFT never writes, where all of them have the same."""
    named = {key: match for key in draft.headers if (match := _NAMED.search(key))}
    if len({match[2] for match in named.values()}) != 1:
        return None
    return _renamed(draft, {key: _NAMED.sub(r"\1", key) for key in named}, told="names without the adapter's own")


def endings(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Write `.weight` at the end of modules' factors, and none at the end of tables', as PEFT does."""
    found = {}
    for key in draft.headers:
        match = _FACTOR.fullmatch(key)
        if match is None or (match[2] and _module(match[1].removeprefix(KEY_PREFIX)) not in base.structure.tables):
            continue
        ending = "" if match[2] else ".weight"
        found[key] = f"{match[1]}.lora_{match[2] or ''}{match[3]}{ending}"
    return _renamed(draft, {key: new for key, new in found.items() if new != key}, told="names end as PEFT's do")


def nesting(draft: Draft, base: Base) -> tuple[Draft, str] | None:
    """Give the factors of several parameters of one module the keys by which PEFT nests its wrappers.

    Their shapes tell which is which, where just one order fits the parameters.
    """
    holders: dict[str, list[ExpertPlace]] = {}
    for name, place in places_of(draft, base).items():
        holders.setdefault(name.rpartition(".")[0], []).append(place)
    found: dict[str, str] = {}
    for places in holders.values():
        if 1 < len(places) <= _NESTED and not all(_is_at(draft, place, place) for place in places):
            orders = [
                order
                for order in permutations(places)
                if all(_is_at(draft, now, meant) for now, meant in zip(order, places, strict=True))
            ]
            if len(orders) != 1:
                return None
            for now, meant in zip(orders[0], places, strict=True):
                found |= dict(zip(now.keys, meant.keys, strict=True))
    return _renamed(draft, {key: new for key, new in found.items() if new != key}, told="parameters nest as in PEFT")


def places_of(draft: Draft, base: Base) -> dict[str, ExpertPlace]:
    """Return where PEFT looks for the factors of the parameters of `target_parameters`; none where it refuses them."""
    entries = draft.config.get("target_parameters")
    if not entries:
        return {}
    try:
        return parameter_places(base.model_class, entries, config=base.folder)
    except ValidationError:
        return {}


def _is_at(draft: Draft, now: ExpertPlace, meant: ExpertPlace) -> bool:
    """Return whether the factors that lie at one place have the sizes of another."""
    a, b = (draft.headers.get(key) for key in now.keys)
    if a is None or b is None or (len(a.shape), len(b.shape)) != (2, 2):
        return False
    rank, rest = divmod(a.shape[0], meant.experts)
    return (a.shape[1], b.shape) == (meant.columns, (meant.rows, rank * meant.experts)) and not rest


# --- what several of them need --------------------------------------------------------------------------------


def _renamed(draft: Draft, names: Mapping[str, str], *, told: str) -> tuple[Draft, str] | None:
    """Return the draft with these keys renamed; None where there are none, or two tensors would get one key."""
    headers = {names.get(key, key): header for key, header in draft.headers.items()}
    if not names or len(headers) != len(draft.headers):
        return None
    return replace(draft, headers=headers), f"{counted(len(names), 'tensor')} renamed: {told}"


def _with_config(draft: Draft, fields: Mapping[str, Any]) -> Draft:
    return replace(draft, config={**draft.config, **fields})


def _module(name: str) -> str:
    """Return the module that a tensor belongs to, by its name without PEFT's prefix."""
    plain = _OF_ADAPTER.sub("", name)
    return (plain if plain != name else name.rpartition(".")[0]).replace(".base_layer", "")


def _modules(draft: Draft) -> frozenset[str]:
    """Return the modules that the file has factors for, as modules and not by their parameters."""
    matches = (_FACTOR.fullmatch(key) for key in draft.headers)
    found = {match[1].removeprefix(KEY_PREFIX) for match in matches if match}
    try:
        return frozenset(found - wrapping(draft.config, found).keys())
    except PatternError:
        return frozenset(found)


def _rank(draft: Draft, module: str) -> int | None:
    header = draft.headers.get(f"{KEY_PREFIX}{module}.lora_A.weight")
    return header.shape[0] if header is not None and is_rank(header.shape[0]) else None


REPAIRS: Final[tuple[Repair, ...]] = (
    adapter_names,
    prefixes,
    endings,
    nesting,
    pattern_keys,
    targets,
    dropout,
    orientation,
)
