"""PEFT and transformers, run: the adapter is put into the base's class without weights, and what became of it told.

The class is built on the meta device. Only under the adapter's own modules lies a weight with a shape and no memory,
so that PEFT, which puts an adapter where the base is, puts it somewhere. Whatever either of them raises over files of
any origin is its verdict, never an error of this tool.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from publisher.adapters.loading import (
    AdapterLocation,
    class_named,
    configuration,
    empty_model,
    for_peft,
    load_adapter,
    quiet,
    stand_in,
)
from publisher.adapters.peft_files import KEY_PREFIX
from publisher.border.adapterconfig import reduced
from publisher.errors import ValidationError, counted
from publisher.loaders.finding import UNIFORM, finding, idle, twice, wrong_scales
from publisher.loaders.subject import Pair, Subject
from publisher.records.loaders import LoaderFinding

_WIDTH = 200  # characters of what a library says of its refusal


@dataclass(frozen=True, slots=True)
class Reached:
    """What became of the adapter.

    Attributes:
        refusal: why it was not loaded; nothing else is set then.
        filled: modules whose factors came from the file.
        lost: tensors of the file that reach no parameter.
        empty: modules that were adapted and had nothing in the file; they change nothing.
        scales: of every adapted module.
    """

    refusal: str = ""
    filled: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()
    empty: frozenset[str] = frozenset()
    scales: Mapping[str, float] = field(default_factory=dict)


def with_peft(subject: Subject, model: Any) -> Reached:
    """`PeftModel.from_pretrained(model, folder)`."""
    with quiet():
        stand_in(model, _shapes(subject, model))
        try:
            loaded, _ = load_adapter(model, AdapterLocation(subject.folder), empty=True)
        except Exception as error:  # noqa: BLE001 - see the module's first words
            return Reached(refusal=_reason(error, subject.folder))
    parameters = dict(_parameters(loaded))
    plain = {key.replace(".default.", "."): key for key in subject.headers}
    there = {name for name, parameter in parameters.items() if name in plain and not parameter.is_meta}
    lost = tuple(sorted(key for name, key in plain.items() if name not in there))
    return _reached(loaded, absent=parameters.keys() - there, lost=lost, prefix=KEY_PREFIX)


def with_transformers(subject: Subject, model: Any) -> Reached:
    """`model.load_adapter(folder)`."""
    with quiet():
        try:
            with for_peft(AdapterLocation(subject.folder), model) as (folder, _), torch.device("meta"):
                seen = model.load_adapter(str(folder))
        except Exception as error:  # noqa: BLE001 - see the module's first words
            return Reached(refusal=_reason(error, subject.folder))
    absent = {name.replace(".default.", ".") for name in seen.missing_keys | {key for key, *_ in seen.mismatched_keys}}
    return _reached(model, absent=absent, lost=tuple(sorted(seen.unexpected_keys)), prefix="")


def findings(subject: Subject, reached: Reached, *, by: str) -> Iterator[LoaderFinding]:
    """What speaks against it, on the class that the adapter is for."""
    if reached.refusal:
        yield finding("unreadable", f"{by} refuses it: {reached.refusal}", remedy=_remedy(subject))
        return
    total = len(subject.pairs)
    if not reached.filled:
        what = f"none of the {counted(total, 'module')} gets its factors, and {by} only warns: it changes nothing"
        yield finding("silent no-op", what, modules=total, silent=True, remedy=_remedy(subject))
        return
    if reached.lost:
        what = f"{counted(len(reached.lost), 'tensor')} of the file {by} drops without a word"
        modules = total - len(reached.filled)
        yield finding("missing module", what, modules=modules, silent=True, remedy=_TARGETS)
    if reached.empty:
        what = f"{counted(len(reached.empty), 'module')} adapted for which the file has nothing"
        yield finding("missing tensor", what, modules=len(reached.empty), silent=True, remedy=_TARGETS)
    known = {name: scale for name, scale in reached.scales.items() if name in subject.pairs}
    why = f"{by} scales by adapter_config.json"
    remedy = "give alpha_pattern the entries of rank_pattern, or extract again: " + UNIFORM
    yield from [*idle(subject), *twice(subject)]
    yield from wrong_scales(subject, lambda name: known.get(name, subject.scale(name)), why=why, remedy=remedy)


_OTHER_CLASS = "load the base by the class whose names the adapter has: its model_class in the manifest"
_OTHER_BASE = "name the base, and its revision, that the adapter was made for: this one has other sizes"
_RANKS = "give r and rank_pattern in adapter_config.json the ranks of the tensors"
_FIELD = "correct what the message names"
_TARGETS = "name in target_modules just the modules of the file, on a base that has them all"


def _remedy(subject: Subject) -> str:
    """Return what helps: it follows from how names, sizes and ranks lie on the base, not from the words of an error."""
    places = {name: subject.base.structure.shapes.get(name) for name in subject.pairs}
    if any(shape is None for shape in places.values()):
        return _OTHER_CLASS
    if any(_is_unlike(pair, places[name]) for name, pair in subject.pairs.items()):
        return _OTHER_BASE
    return _RANKS if any(pair.rank != subject.config_rank(name) for name, pair in subject.pairs.items()) else _FIELD


def _is_unlike(pair: Pair, shape: tuple[int, int] | None) -> bool:
    """Whether a module's factors are for a weight of another shape (out, in)."""
    if pair.a is None or pair.b is None or len(pair.a) != len(pair.b) or len(pair.a) != len("ab"):
        return False
    return (pair.b[0], pair.a[1]) != shape


def empty_base(subject: Subject) -> Any:
    """The class that the adapter is for, without weights.

    Raises:
        ValidationError: transformers has no such class, or it is not for the base's config.json.
    """
    return empty_model(subject.base.model_class, configuration(subject.base.folder)).eval()


def text_only(subject: Subject) -> tuple[str, Any] | None:
    """The class that AutoModelForCausalLM builds of this base, where that is another: its name, and it itself."""
    config = configuration(subject.base.folder)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if not isinstance(name, str) or name == subject.base.model_class:
        return None
    try:
        wanted = class_named(name).config_class
        inner = config if isinstance(config, wanted) else config.get_text_config()
        return name, empty_model(name, inner).eval()
    except ValidationError:
        return None


def on_text_only(subject: Subject, reached: Reached, name: str, *, by: str) -> str:
    """The same on the class that AutoModelForCausalLM builds, as a caution."""
    where = f"on {name}, which AutoModelForCausalLM builds,"
    if reached.refusal:
        return f"{where} {by} refuses it"
    if not reached.filled:
        return f"{where} it changes nothing, and {by} only warns"
    return f"{where} {len(reached.filled)} of {counted(len(subject.pairs), 'module')} are adapted"


def left_out(subject: Subject) -> list[str]:
    """Return what is to be said of the fields that PEFT was not given here."""
    fields = reduced(subject.config).left_out
    return [f"tried without {', '.join(fields)} of adapter_config.json, which it may act upon"] if fields else []


def _shapes(subject: Subject, model: Any) -> dict[str, tuple[int, int]]:
    """(out, in) of the adapter's modules that this model has, as it stores them."""
    there = dict(model.named_modules())
    shapes = {}
    for name, pair in subject.pairs.items():
        weight = getattr(there.get(name), "weight", None)
        if pair.a and pair.b and weight is not None and weight.dim() == len(pair.a):
            shapes[name] = tuple(weight.shape)
    return shapes


def _parameters(loaded: Any) -> Iterator[tuple[str, Any]]:
    """What was put in, by the names that the file has for it."""
    for name, parameter in loaded.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".modules_to_save." in name:
            plain = name.replace(".modules_to_save.", ".").replace(".default.", ".")
            dora = ".lora_magnitude_vector." in plain
            yield plain.removesuffix(".weight" if dora else ".default"), parameter


def _reached(loaded: Any, *, absent: Any, lost: tuple[str, ...], prefix: str) -> Reached:
    layers = {
        name.removeprefix(prefix): layer for name, layer in loaded.named_modules() if isinstance(layer, LoraLayer)
    }
    factors = [key for key in absent if ".lora_magnitude_vector" not in key]  # without it a module still has A and B
    empty = frozenset(name for name in layers if any(key.startswith(f"{prefix}{name}.lora_") for key in factors))
    return Reached(
        filled=frozenset(layers) - empty,
        lost=lost,
        empty=empty,
        scales={name: float(layer.scaling["default"]) for name, layer in layers.items()},
    )


def _reason(error: Exception, folder: Path) -> str:
    """The refusal on one line, with no path of this machine and no set, whose order changes."""
    cause = error.__cause__ if isinstance(error, ValidationError) and error.__cause__ is not None else error
    text = re.sub(r"\{[^}]*\}", "{…}", " ".join(str(cause).split())).replace(str(folder), "the adapter")
    return text[:_WIDTH].rstrip(". ") or type(cause).__name__
