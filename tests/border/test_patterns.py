"""Patterns are matched by RE2, with PEFT's own verdicts on whatever both engines read alike."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from publisher.border.adapterconfig import is_targeted, reduced, resolved, targeted
from publisher.border.patterns import Keys, Pattern, literal, matching
from publisher.errors import PatternError, UncheckablePatternError

_PARTS = ("model", "layers", "lm_head", "q_proj", "v_proj", "mlp", "experts", "0", "1", "12")
NAMES = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=6).map(".".join)
_ATOMS = st.sampled_from(
    [
        *_PARTS,
        r"\.",
        ".",
        r"\d+",
        r"\w*",
        ".*",
        "[0-9]",
        "[^.]+",
        "(q|v)_proj",
        "(?:model)?",
        r"(layers\.)?",
        "_",
        "a{1,2}",
    ]
)
PATTERNS = st.one_of(
    st.lists(_ATOMS, min_size=1, max_size=5).map("".join),
    st.lists(_ATOMS, min_size=2, max_size=3).map("|".join),
)
LISTS = st.lists(NAMES, min_size=1, max_size=3)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """The fields by which PEFT selects modules, as it lets them stand beside each other."""
    config: dict[str, Any] = {"target_modules": draw(st.one_of(PATTERNS, LISTS))}
    config["exclude_modules"] = draw(st.one_of(st.none(), PATTERNS, LISTS))
    config["modules_to_save"] = draw(st.one_of(st.none(), LISTS))
    if isinstance(config["target_modules"], list):
        layers = st.integers(0, 12)
        config["layers_to_transform"] = draw(st.one_of(st.none(), layers, st.lists(layers, max_size=3)))
        if config["layers_to_transform"] is not None:
            config["layers_pattern"] = draw(st.one_of(st.none(), PATTERNS, st.lists(PATTERNS, max_size=2)))
    return config


@settings(max_examples=400, deadline=None)
@given(configurations(), NAMES)
def test_a_module_is_selected_just_where_peft_selects_it(config: dict[str, Any], name: str) -> None:
    fields = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
    rule = SimpleNamespace(target_parameters=None, **{field: config.get(field) for field in fields})
    assert is_targeted(config, name) == bool(check_target_module_exists(rule, name))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(NAMES, PATTERNS), max_size=5, unique=True), NAMES)
def test_the_key_of_a_module_is_the_one_that_peft_takes(keys: list[str], name: str) -> None:
    assert (Keys(keys).key_for(name) or name) == get_pattern_key(keys, name)


@settings(max_examples=200, deadline=None)
@given(configurations(), st.lists(NAMES, min_size=1, max_size=8, unique=True))
def test_what_peft_gets_instead_of_patterns_selects_the_same_modules(config: dict[str, Any], names: list[str]) -> None:
    given_fields = {"peft_type": "LORA", **config}
    wanted = targeted(config, names)
    if not wanted:
        return
    fields, _ = resolved(reduced(given_fields), names)
    every = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")
    rule = SimpleNamespace(target_parameters=None, **{field: fields.get(field) for field in every})
    assert [name for name in names if check_target_module_exists(rule, name)] == wanted


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(PATTERNS, st.integers(1, 9), min_size=1, max_size=4), st.lists(NAMES, min_size=1, unique=True))
def test_what_peft_gets_instead_of_keys_gives_the_same_ranks(ranks: dict[str, int], names: list[str]) -> None:
    config = {"peft_type": "LORA", "target_modules": names, "rank_pattern": ranks}
    fields, _ = resolved(reduced(config), names)
    handed = fields["rank_pattern"]
    for name in names:
        assert handed.get(get_pattern_key(handed, name)) == ranks.get(get_pattern_key(ranks, name))


@pytest.mark.parametrize(
    "text",
    [
        "(?=a)b",
        "(?!a).*",
        "(?<=a)b",
        r"(a)\1",
        r"(?P<x>a)(?P=x)",
        "(?i)A",
        "a++",
        r"\Z",
        "(?>a)",
        "a{,3}",
        "[[a]",
        "x" * 10_001,
    ],
)
def test_what_one_engine_has_alone_is_not_tried(text: str) -> None:
    with pytest.raises(UncheckablePatternError):
        Pattern.of(text)


@pytest.mark.parametrize("text", ["(", ")", "*a", "[b-a]", "a|*"])
def test_what_is_no_pattern_is_said_to_be_none(text: str) -> None:
    with pytest.raises(PatternError, match="no regular expression") as caught:
        Pattern.of(text)
    assert not isinstance(caught.value, UncheckablePatternError)


def test_nested_repetition_ends() -> None:
    assert matching("(([a-z._0-9]+)+)+!", ["model.layers.0.self_attn.q_proj" * 10] * 100) == []


def test_too_many_patterns_on_too_many_names_are_refused_at_once() -> None:
    names = [f"model.layers.{number}.self_attn.q_proj" for number in range(20_000)]
    keys = Keys([f"(a?){{{times}}}b" for times in range(800, 1000)])
    with pytest.raises(UncheckablePatternError, match="too many"):
        keys.used(names)


def test_a_literal_pattern_matches_its_names_and_no_others() -> None:
    import re

    pattern = literal(["a.b", "a", "(x)+"])
    assert [bool(re.fullmatch(pattern, name)) for name in ("a.b", "a", "(x)+", "axb", "xx", "b.a")] == [True] * 3 + [
        False
    ] * 3
