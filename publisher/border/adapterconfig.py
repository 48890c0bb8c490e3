"""adapter_config.json of others, reduced to known fields of LoRA with checked types before PEFT sees it.

PEFT imports, downloads or runs what some fields name (`megatron_core`, `auto_mapping`, data-driven initialisations) and
gives patterns to `re`. Here each field that loading needs is checked and bounded, everything else is left out and
named, and patterns are matched by RE2 (`patterns`): PEFT gets the names that they mean.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from publisher.border.limits import LIMITS
from publisher.border.patterns import Keys, Pattern, is_plain, literal, matching
from publisher.errors import PatternError, UncheckablePatternError, ValidationError, shown

ALL_LINEAR: Final = "all-linear"
_TASKS: Final = ("SEQ_CLS", "SEQ_2_SEQ_LM", "CAUSAL_LM", "TOKEN_CLS", "QUESTION_ANS", "FEATURE_EXTRACTION")
_NUMBER: Final = 1e12  # of a scale
_SAID_ELSEWHERE: Final = frozenset({"base_model_name_or_path", "revision", "peft_version", "inference_mode"})
_IDLE: Final = {"megatron_core": "megatron_config"}
_ITERATIONS: Final = re.compile(r"[a-z_]+_niter_[0-9]{1,3}")
_BITS: Final = (2, 4, 8)  # of a weight, by LoftQ
_ROUNDS: Final = 100  # of LoftQ
_BY_PATTERN: Final = ("rank_pattern", "alpha_pattern")
_MATCHING: Final = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
)


@dataclass(frozen=True, slots=True)
class Reduced:
    """What PEFT may see of a configuration.

    Attributes:
        fields: known ones, checked.
        left_out: the names of those that hold something and are not handed on.
    """

    fields: Mapping[str, Any]
    left_out: tuple[str, ...]


def reduced(config: Mapping[str, Any]) -> Reduced:
    """Return the known fields of a LoRA configuration; null counts as not there.

    Raises:
        ValidationError: it is not for LoRA, or a known field holds a value of another type or beyond its limit.
    """
    if config.get("peft_type") != "LORA":
        raise ValidationError(
            f"adapter_config.json: peft_type is {shown(config.get('peft_type'))}", expected="'LORA', as for a LoRA"
        )
    fields = {name: config[name] for name in _KNOWN if config.get(name) is not None}
    problems = [
        f"{name} is {shown(value)}; expected {_KNOWN[name][1]}"
        for name, value in fields.items()
        if not _KNOWN[name][0](value)
    ]
    if problems:
        raise ValidationError(f"adapter_config.json: {'; '.join(problems[:4])}", next_step="correct these fields")
    rest = [name for name, value in config.items() if value and not _is_said(name) and not _is_idle(name, config)]
    _require_few_patterns(fields)
    return Reduced(fields | {"init_lora_weights": config.get("init_lora_weights") is not False}, tuple(sorted(rest)))


def initialisation(config: Mapping[str, Any]) -> str:
    """Return the name in `init_lora_weights`; empty where the field is true, false or not there.

    `reduced` hands on none: the factors of a file take the place of whatever they begin with. What it does to the base
    is for `publisher.adapters.initialisation`.

    Raises:
        ValidationError: it is no name, or asks for more iterations than anybody needs.
    """
    found = config.get("init_lora_weights")
    if found is None or isinstance(found, bool):
        return ""
    if not is_text(found) or (any(map(str.isdecimal, found)) and _ITERATIONS.fullmatch(found) is None):
        raise ValidationError(
            f"adapter_config.json: init_lora_weights is {shown(found)}",
            expected="true, false, or an initialisation that PEFT knows",
            next_step="correct this field",
        )
    return str(found)


def loftq(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `loftq_config` with the numbers that PEFT reads; nothing where it has none, or others than LoftQ's."""
    found = config.get("loftq_config")
    if not isinstance(found, dict) or not found:
        return {}
    bits, rounds = found.get("loftq_bits"), found.get("loftq_iter")
    small = bits in _BITS and isinstance(rounds, int) and 0 < rounds <= _ROUNDS
    return {"loftq_config": {"loftq_bits": bits, "loftq_iter": rounds}} if small else {}


def _is_said(name: str) -> bool:
    return name in {"peft_type", "init_lora_weights", "loftq_config"} or name in _SAID_ELSEWHERE or name in _KNOWN


def _is_idle(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether PEFT reads the field only where another is set; PEFT writes such defaults into every file."""
    if (
        name == "auto_mapping"
    ):  # names the base's class; where that is not of transformers, PEFT would import the module
        library = config[name].get("parent_library") if isinstance(config[name], dict) else None
        return isinstance(library, str) and library.partition(".")[0] == "transformers"
    return name in _IDLE and not config.get(_IDLE[name])


# --- the fields ---------------------------------------------------------------------------------------------


def is_rank(value: object) -> bool:
    """Return whether this is a whole number above zero, and no larger than any rank."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LIMITS.rank


def is_number(value: object) -> bool:
    """Return whether this is a finite number of a size that any arithmetic takes."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -_NUMBER <= value <= _NUMBER  # NaN is not


def is_text(value: object) -> bool:
    """Return whether this is a name: a string, not empty, without control characters, no longer than any name."""
    return isinstance(value, str) and 0 < len(value) <= LIMITS.name_characters and value.isprintable()


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LIMITS.pattern_characters and value.isprintable()


def _is_list(value: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(value, list) and len(value) <= LIMITS.patterns and all(map(holds, value))


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LIMITS.integer


def _are_names(value: object) -> bool:
    return _is_list(value, is_text)


def _are_modules(value: object) -> bool:
    return _is_pattern(value) or _are_names(value)


def _are_layers(value: object) -> bool:
    return _is_index(value) or _is_list(value, _is_index)


def _are_indices(value: object) -> bool:
    if isinstance(value, dict):
        return len(value) <= LIMITS.patterns and all(is_text(k) and _is_list(v, _is_index) for k, v in value.items())
    return _is_list(value, _is_index)


def _is_by_pattern(holds: Callable[[object], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        return isinstance(value, dict) and all(_is_pattern(k) and holds(v) for k, v in value.items())

    return check


def _are_replicated(value: object) -> bool:
    """Return whether these are spans of layers, all together no more than any model has."""
    if not isinstance(value, list) or len(value) > LIMITS.layer_replications:
        return False
    spans = [span for span in value if isinstance(span, list) and len(span) == len("ab") and all(map(_is_index, span))]
    return len(spans) == len(value) and sum(max(b - a, 0) for a, b in spans) <= LIMITS.layer_replications


def _whole(value: object) -> object:
    """Return a whole number that is written as 4.0 as what it is; each loader then takes or refuses it itself."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _are_settings(value: object) -> bool:
    """Return whether these are a few plain values by name; PEFT refuses names that it does not know."""
    return (
        isinstance(value, dict)
        and len(value) <= _FEW
        and all(
            one is None or isinstance(one, bool) or is_text(one) or (is_number(one) and abs(_float(one)) <= _SMALL)
            for one in value.values()
        )
    )


_FEW: Final = 16  # settings of a variant of LoRA
_SMALL: Final = 1024  # the largest number among them
_SETTINGS: Final = f"at most {_FEW} settings, no number above {_SMALL}"
_FLAG: Final = (_is_flag, "true or false")
_RANK: Final = f"a whole number from 1 to {LIMITS.rank:,}"
_LIST: Final = f"a list of at most {LIMITS.patterns:,} names"
_KNOWN: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "task_type": (lambda value: value is None or value in _TASKS, f"null, or one of {', '.join(_TASKS)}"),
    "r": (is_rank, _RANK),
    "lora_alpha": (is_number, f"a number of at most {_NUMBER:g}"),
    "rank_pattern": (_is_by_pattern(lambda value: is_rank(_whole(value))), f"for each pattern {_RANK}"),
    "alpha_pattern": (_is_by_pattern(is_number), f"for each pattern a number of at most {_NUMBER:g}"),
    "target_modules": (_are_modules, f"a pattern of at most {LIMITS.pattern_characters:,} characters, or {_LIST}"),
    "exclude_modules": (_are_modules, f"a pattern of at most {LIMITS.pattern_characters:,} characters, or {_LIST}"),
    "modules_to_save": (_are_names, _LIST),
    "target_parameters": (_are_names, _LIST),
    "layers_to_transform": (_are_layers, "numbers of layers"),
    "layers_pattern": (_are_modules, f"a pattern, or {_LIST}"),
    "layer_replication": (_are_replicated, f"pairs of layers, at most {LIMITS.layer_replications:,} layers in all"),
    "trainable_token_indices": (_are_indices, "token ids, or such lists by module"),
    "alora_invocation_tokens": (lambda value: _is_list(value, _is_index), "token ids"),
    "lora_dropout": (lambda value: is_number(value) and 0 <= _float(value) <= 1, "a number from 0 to 1"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
    "fan_in_fan_out": _FLAG,
    "use_rslora": _FLAG,
    "use_dora": _FLAG,
    "lora_bias": _FLAG,
    "ensure_weight_tying": _FLAG,
    "use_qalora": _FLAG,
    "qalora_group_size": (is_rank, _RANK),
    "kasa_config": (_are_settings, _SETTINGS),
    "velora_config": (_are_settings, _SETTINGS),
    "monteclora_config": (_are_settings, _SETTINGS),
}


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _require_few_patterns(fields: Mapping[str, Any]) -> None:
    """Raise ValidationError where all patterns and lists of names together are too many."""
    number = sum(len(fields[name]) for name in _KNOWN if isinstance(fields.get(name), list | dict))
    if number > LIMITS.patterns:
        raise ValidationError(
            f"adapter_config.json holds {number:,} names and patterns", expected=f"at most {LIMITS.patterns:,}"
        )


# --- patterns become names ----------------------------------------------------------------------------------


def is_targeted(config: Mapping[str, Any], name: str) -> bool:
    """Return whether PEFT adapts the module of this name, by its rule `check_target_module_exists`.

    Args:
        config: the matching fields, of the types that `reduced` lets through; `target_modules` is not `all-linear`.
        name: of a module.

    Returns:
        Whether it is named, and neither excluded nor saved as a whole.

    Raises:
        PatternError, UncheckablePatternError: a pattern is none, or cannot be matched here.
    """
    return bool(targeted(config, [name]))


def targeted(config: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return the modules that PEFT adapts among these, as `is_targeted`, each pattern being read once."""
    wanted = config.get("target_modules")
    excluded = _excluded(config, names)
    if wanted is None:
        return []
    if isinstance(wanted, str):
        return [name for name in matching(wanted, names) if name not in excluded]
    ends = _Endings(wanted)
    numbered = _numbered(config, names)
    listed = frozenset(wanted)  # by its whole name, a module is meant in whatever layer it lies
    meant = [name for name in names if name in listed or (ends.holds(name) and numbered(name))]
    return [name for name in meant if name not in excluded]


def wrapping(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return which modules of an adapter's file are PEFT's wrappers of single parameters, and of which they may be.

    Args:
        config: the fields that `reduced` lets through.
        names: of the modules that the file has tensors for; a wrapper inside of another ends in `.base_layer`.

    Returns:
        By wrapper, the full names of all parameters of its module that `target_parameters` names.

    Raises:
        UncheckablePatternError: an entry names no module, so that it means a parameter wherever there is one.
    """
    entries = config.get("target_parameters") or ()
    if loose := [entry for entry in entries if "." not in entry]:
        raise UncheckablePatternError(f"target_parameters names {shown(loose[0])}, of whatever module has one")
    ends: dict[str, list[str]] = {}
    for entry in entries:
        holder, _, leaf = entry.rpartition(".")
        ends.setdefault(holder, []).append(leaf)
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        place = name.replace(".base_layer", "")
        starts = (0, *(at + 1 for at, sign in enumerate(place) if sign == "."))
        if leaves := sorted({leaf for start in starts for leaf in ends.get(place[start:], ())}):
            found[name] = tuple(f"{place}.{leaf}" for leaf in leaves)
    return found


class _Endings:
    """A list of names, each of which stands for itself and for what ends in it after a dot."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = frozenset(entries)

    def holds(self, name: str) -> bool:
        """Return whether the name is meant."""
        return any(
            name[start:] in self._entries for start in [0, *(at + 1 for at, sign in enumerate(name) if sign == ".")]
        )


def _excluded(config: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    without, saved = config.get("exclude_modules"), config.get("modules_to_save")
    found: set[str] = set()
    if isinstance(without, str) and without:
        found.update(matching(without, names))
    elif without:
        ends = _Endings(without)
        found.update(name for name in names if ends.holds(name))
    for entry in saved or ():
        found.update(matching(rf"(^|.*\.){entry}($|\..*)", names))
    return found


def _numbered(config: Mapping[str, Any], names: Sequence[str]) -> Callable[[str], bool]:
    """Return what tells whether a name lies in one of the layers to transform."""
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    if layers is None or layers == []:
        return lambda _: True
    wanted = {layers} if isinstance(layers, int) else set(layers)
    rules = [r".*?\.[^.]*\.(?P<idx>\d+)\."]
    if pattern:
        entries = [pattern] if isinstance(pattern, str) else pattern
        rules = [rf"(?:^|.*?\.){entry}\.(?P<idx>\d+)\." for entry in entries]
    patterns = [Pattern.of(rule, captures=True) for rule in rules]
    _require_work(sum(pattern.steps(names) for pattern in patterns))

    def lies(name: str) -> bool:
        indices = (pattern.first_group(name, "idx") for pattern in patterns)
        first = next((index for index in indices if index is not None), None)
        return first is not None and int(first) in wanted

    return lies


def _require_work(steps: int) -> None:
    if steps > LIMITS.pattern_steps:
        raise UncheckablePatternError("the patterns of layers and the names together are too many to match")


def resolved(found: Reduced, names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields for PEFT, every pattern in them replaced by the names that it means in this model.

    Args:
        found: the reduced configuration.
        names: of all modules of the model.

    Returns:
        The fields, and a complaint for each pattern that means no module.

    Raises:
        PatternError, UncheckablePatternError: a pattern is none, or cannot be matched here.
        ValidationError: no module is meant, or the lists are too long for a model of this size.
    """
    fields = dict(found.fields)
    _require_matchable(fields, names)
    if odd := [entry for entry in fields.get("modules_to_save", ()) if not is_plain(entry)]:
        raise PatternError(f"modules_to_save names {shown(odd[0])}", expected="names of letters, digits, _, - and .")
    meant = _resolve_modules(fields, names)
    return fields, [line for field in _BY_PATTERN for line in _resolve_keys(fields, field, names=names, meant=meant)]


def _resolve_modules(fields: dict[str, Any], names: Sequence[str]) -> Sequence[str]:
    """Replace the patterns that select modules, and return the selected modules, as far as that can be told."""
    wanted = fields.get("target_modules")
    patterned = _has_patterns(fields)
    if patterned and "layer_replication" in fields:
        raise UncheckablePatternError("layer_replication with patterns: which modules they mean is not worked out")
    everything = wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR)
    meant = names if everything else targeted(fields, names)
    if isinstance(fields.get("exclude_modules"), str):  # where it means none, PEFT is to say so
        fields["exclude_modules"] = literal(matching(fields["exclude_modules"], names) or ["\0"])
    if everything and not all(map(is_plain, _layers_told(fields))):
        raise UncheckablePatternError("layers_pattern with every linear module: which modules that is depends on PEFT")
    if everything or not patterned:
        return meant
    if not meant:
        raise ValidationError(f"target_modules {shown(wanted)} means no module of the model")
    for name in ("layers_to_transform", "layers_pattern"):
        fields.pop(name, None)
    fields["target_modules"] = literal(meant)
    return meant


def _has_patterns(fields: Mapping[str, Any]) -> bool:
    return (
        isinstance(fields.get("target_modules"), str)
        or isinstance(fields.get("exclude_modules"), str)
        or not all(map(is_plain, _layers_told(fields)))
    )


def _layers_told(fields: Mapping[str, Any]) -> Sequence[str]:
    pattern: str | list[str] = fields.get("layers_pattern", [])
    return [pattern] if isinstance(pattern, str) else pattern


def _resolve_keys(fields: dict[str, Any], field: str, *, names: Sequence[str], meant: Sequence[str]) -> list[str]:
    """Replace the keys of rank_pattern or alpha_pattern by a literal pattern for each value; complain of idle keys."""
    given: Mapping[str, Any] = fields.get(field, {})
    if all(map(is_plain, given)) and len(given) * len(meant) <= LIMITS.key_matches:
        return []
    if "layer_replication" in fields:
        raise UncheckablePatternError("layer_replication with patterns: which modules they mean is not worked out")
    keys = Keys(list(given))
    groups: dict[Any, list[str]] = {}
    for name in names:
        if (key := keys.key_for(name)) is not None:
            groups.setdefault(given[key], []).append(name)
    fields[field] = {literal(group): value for value, group in groups.items()}
    idle = sorted(set(given) - keys.used(meant))
    return [f"keys of {field} that match no module: {', '.join(idle[:4])}"] if idle else []


def _require_matchable(fields: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ValidationError where PEFT would compare more names than it can in a reasonable time."""
    longest = max((len(fields[name]) for name in _MATCHING if isinstance(fields.get(name), list)), default=0)
    if longest * len(names) > LIMITS.matches:
        raise ValidationError(
            f"adapter_config.json lists {longest:,} names for a model of {len(names):,} modules",
            expected=f"at most {LIMITS.matches:,} comparisons of names",
        )
    spans = fields.get("layer_replication") or [[0, 0]]
    modules = sum(max(b - a, 0) for a, b in spans) * len(names) // max(1, *(b for _, b in spans))
    if modules > LIMITS.modules:
        raise ValidationError(
            f"adapter_config.json: layer_replication makes about {modules:,} modules",
            expected=f"at most {LIMITS.modules:,}",
        )
