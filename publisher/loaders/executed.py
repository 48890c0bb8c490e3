"""Run PEFT and transformers: put an adapter into the base's class without weights, and report what became of it.

The class is built on the meta device. Only under the adapter's own modules lies a weight with a shape and no memory,
so that PEFT, which puts an adapter where the base is, puts it somewhere. Whatever either of them raises over files of
any origin is its verdict, never an error of this tool.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from publisher.adapters.loading import (
    AdapterLocation,
    adapter_parameters,
    class_named,
    configuration,
    empty_model,
    for_peft,
    labels_in,
    load_adapter,
    passed_over,
    quiet,
    stand_in,
)
from publisher.border.adapterconfig import reduced
from publisher.errors import UncheckablePatternError, ValidationError, counted
from publisher.loaders.finding import (
    UNIFORM,
    changes_nothing,
    finding,
    other_base,
    other_packing,
    repeated_factors,
    wrong_scales,
)
from publisher.loaders.subject import FactorShapes, Subject
from publisher.records.extraction import KEY_PREFIX
from publisher.records.loaders import LoaderFinding

_WIDTH = 200  # characters of what a library says of its refusal


@dataclass(frozen=True, slots=True)
class Reached:
    """What became of an adapter that was put into a model.

    Attributes:
        refusal: why it was not loaded; nothing else is set then.
        unchecked: why it could not be tried; nothing else is set then.
        filled: modules whose factors came from the file.
        lost: tensors of the file that reach no parameter.
        empty: modules that were adapted and had nothing in the file; they change nothing.
        scales: the scale of every adapted module, by name.
    """

    refusal: str = ""
    unchecked: str = ""
    filled: frozenset[str] = frozenset()
    lost: tuple[str, ...] = ()
    empty: frozenset[str] = frozenset()
    scales: Mapping[str, float] = field(default_factory=dict)


def with_peft(subject: Subject, model: Any) -> Reached:
    """Load the adapter as `PeftModel.from_pretrained(model, folder)` does, and return what became of it."""
    with quiet():
        stand_in(model)
        try:
            loaded, _ = load_adapter(model, AdapterLocation(subject.folder), empty=True)
            lost = tuple(passed_over(loaded, AdapterLocation(subject.folder)))
        except UncheckablePatternError as error:
            return Reached(unchecked=error.found)
        except Exception as error:  # noqa: BLE001 - see the module's first words
            return Reached(refusal=_reason(error, subject.folder))
    absent = {name for name, parameter in adapter_parameters(loaded) if parameter.is_meta}
    return _reached(loaded, absent=absent, lost=lost, prefix=KEY_PREFIX)


def with_transformers(subject: Subject, model: Any) -> Reached:
    """Load the adapter as transformers' `model.load_adapter(folder)` does, and return what became of it."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sets that it returns say more
        try:
            with for_peft(AdapterLocation(subject.folder), model) as (folder, _), torch.device("meta"):
                seen = model.load_adapter(str(folder))
        except UncheckablePatternError as error:
            return Reached(unchecked=error.found)
        except Exception as error:  # noqa: BLE001 - see the module's first words
            return Reached(refusal=_reason(error, subject.folder))
    absent = {name.replace(".default.", ".") for name in seen.missing_keys | {key for key, *_ in seen.mismatched_keys}}
    return _reached(model, absent=absent, lost=tuple(sorted(seen.unexpected_keys)), prefix="")


def findings(subject: Subject, reached: Reached, *, by: str) -> Iterator[LoaderFinding]:
    """Yield what speaks against a loader, on the class that the adapter is for.

    Args:
        subject: the adapter and its base.
        reached: what became of the adapter there.
        by: what messages call the loader.

    Returns:
        The findings; none where the adapter works as it is meant, or could not be tried.
    """
    if reached.unchecked:
        return
    if reached.refusal:
        yield finding("unreadable", f"{by} refuses it: {reached.refusal}", remedy=_remedy(subject))
        return
    total = len(subject.factors)
    if not reached.filled:
        what = f"none of the {counted(total, 'module')} gets its factors, and {by} only warns: it changes nothing"
        yield finding("silent no-op", what, modules=total, silent=True, remedy=_remedy(subject))
        return
    if reached.lost:
        what = f"{counted(len(reached.lost), 'tensor')} of the file {by} drops without a word"
        modules = max(total - len(reached.filled), 0) or len(reached.lost)
        yield finding("missing module", what, modules=modules, silent=True, remedy=_TARGETS)
    if reached.empty:
        what = f"{counted(len(reached.empty), 'module')} adapted for which the file has nothing"
        yield finding("missing tensor", what, modules=len(reached.empty), silent=True, remedy=_TARGETS)
    known = {name: scale for name, scale in reached.scales.items() if name in subject.factors}
    why = f"{by} scales by adapter_config.json"
    remedy = "give alpha_pattern the entries of rank_pattern, or extract again: " + UNIFORM
    yield from [*changes_nothing(subject), *repeated_factors(subject), *other_packing(subject, by=by)]
    yield from wrong_scales(subject, lambda name: known.get(name, subject.scale(name)), why=why, remedy=remedy)


_OTHER_CLASS = "load the base by the class whose names the adapter has: its model_class in the manifest"
_OTHER_BASE = "name the base, and its revision, that the adapter was made for: this one has other sizes"
_RANKS = "give r and rank_pattern in adapter_config.json the ranks of the tensors"
_FIELD = "correct what the message names"
_TARGETS = "name in target_modules just the modules of the file, on a base that has them all"


def _remedy(subject: Subject) -> str:
    """Return what helps: it follows from how names, sizes and ranks lie on the base, not from the words of an error."""
    on_base = {name: subject.base.structure.shapes.get(name) for name in subject.factors}
    if any(shape is None for shape in on_base.values()):
        return _OTHER_CLASS
    if any(_is_unlike(factors, on_base[name]) for name, factors in subject.factors.items()):
        return _OTHER_BASE
    if any(factors.rank != subject.config_rank(name) for name, factors in subject.factors.items()):
        return _RANKS
    return _FIELD


def _is_unlike(factors: FactorShapes, shape: tuple[int, int] | None) -> bool:
    """Return whether a module's factors are matrices for a weight of another shape (out, in)."""
    if factors.a is None or factors.b is None or len(factors.a) != len(factors.b) or len(factors.a) != len("ab"):
        return False
    return (factors.b[0], factors.a[1]) != shape


@dataclass(frozen=True, slots=True)
class Trial:
    """What one of the two loaders makes of an adapter on its own class.

    Attributes:
        findings: what speaks against it.
        notes: what is to be known beside.
        unchecked: why it could not be tried; empty where it was.
    """

    findings: Sequence[LoaderFinding]
    notes: Sequence[str] = ()
    unchecked: str = ""


def trial(subject: Subject, reached: Reached, *, by: str) -> Trial:
    """Return what the loader makes of the adapter, its initialisation included, which was tried apart.

    Args:
        subject: the adapter and its base.
        reached: what became of the adapter on its own class.
        by: what messages call the loader.

    Returns:
        The findings, and what is to be known beside.
    """
    seen, notes = subject.initialised, left_out(subject)
    if seen.refusal is not None:
        told = _reason(seen.refusal, subject.folder)
        what = f"{by} refuses init_lora_weights {seen.name}: {told}"
        return Trial([finding("unreadable", what, remedy=_PLAIN)], notes)
    found = list(findings(subject, reached, by=by))
    if not seen.again:
        return Trial([*found, *other_base(subject, by=by)], notes, reached.unchecked)
    drawn = ", by random numbers, so that each load gives slightly other weights" if seen.is_approximate else ""
    told = f"init_lora_weights is {seen.name}: {by} changes the base's weights again as it loads it{drawn}"
    return Trial(found, [told, *notes], reached.unchecked)


_PLAIN = "set init_lora_weights to true, if B A is meant for the base's own weights"


def empty_base(subject: Subject) -> Any:
    """Build a model of the class that the adapter is for, without weights.

    Raises:
        ValidationError: transformers has no such class, or it is not for the base's config.json.
    """
    labels = labels_in(AdapterLocation(subject.folder))
    return empty_model(subject.base.model_class, configuration(subject.base.folder, labels=labels)).eval()


def text_only(subject: Subject) -> tuple[str, Any] | None:
    """Build a model of the class that AutoModelForCausalLM builds of this base, without weights.

    Returns:
        The name of the class, and the model; None where it is the class that the adapter is for, or there is none.
    """
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


def on_text_only(subject: Subject, reached: Reached, *, name: str, by: str) -> str:
    """Tell what becomes of the adapter on the class that AutoModelForCausalLM builds, as a caution.

    Args:
        subject: the adapter and its base.
        reached: what became of the adapter on that class.
        name: the name of that class.
        by: what messages call the loader.

    Returns:
        A note for the verdict, in one sentence.
    """
    where = f"on {name}, which AutoModelForCausalLM builds,"
    if reached.unchecked:
        return ""
    if reached.refusal:
        return f"{where} {by} refuses it"
    if not reached.filled:
        return f"{where} it changes nothing, and {by} only warns"
    return f"{where} {len(reached.filled)} of {counted(len(subject.factors), 'module')} are adapted"


def left_out(subject: Subject) -> list[str]:
    """Return a note on the fields of adapter_config.json that PEFT was not given here; no note where it had all."""
    fields = reduced(subject.config).left_out
    return [f"tried without {', '.join(fields)} of adapter_config.json, which it may act upon"] if fields else []


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
    """Return a refusal on one line, with no path of this machine and no set, whose order changes."""
    cause = error.__cause__ if isinstance(error, ValidationError) and error.__cause__ is not None else error
    text = re.sub(r"\{[^}]*\}", "{…}", " ".join(str(cause).split())).replace(str(folder), "the adapter")
    return text[:_WIDTH].rstrip(". ") or type(cause).__name__
