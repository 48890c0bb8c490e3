"""The problems that pydantic finds in a manifest, in words that say what to write instead."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from publisher.border.escape import for_terminal
from publisher.manifest.fields import PIN, quoted
from publisher.manifest.schema import (
    AdapterSettings,
    CardSettings,
    Dataset,
    Expectation,
    Fp8Base,
    Manifest,
    Reference,
    RequestSet,
    Signer,
    SigstoreSigner,
    Variant,
    VerificationSettings,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with one manifest.

    Attributes:
        file: the manifest.
        field: the field's place, such as `variants[0].source.repo`; empty where it is the file as a whole.
        what: what is wrong, and what to do.
    """

    file: Path
    field: str
    what: str

    def __str__(self) -> str:
        place = f"{self.file}: {self.field}" if self.field else f"{self.file}"
        return for_terminal(f"{place}: {self.what}")


def problem_of(path: Path, details: ErrorDetails) -> Problem:
    """Return one of pydantic's complaints as a problem of this manifest."""
    what = _EXPLANATIONS.get(details["type"], _otherwise)(details)
    return Problem(path, dotted(details["loc"]), what.replace(PIN, f"publish pin {path}"))


def dotted(loc: Sequence[int | str]) -> str:
    """Return the place of a field as people write it, such as `variants[0].source.repo`."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.removeprefix(".")


def _otherwise(details: ErrorDetails) -> str:
    return f"is {kind_of(details['input'])}: {details['msg'][:1].lower()}{details['msg'][1:]}; see docs/manifest.md"


def _wrong_kind(expected: str) -> Callable[[ErrorDetails], str]:
    return lambda details: f"is {kind_of(details['input'])} where {expected} belongs; see docs/manifest.md"


def _not_text(details: ErrorDetails) -> str:
    given = details["input"]
    if given is None:
        return "is empty; write a value after the colon"
    if isinstance(given, list | dict):
        return f"is {kind_of(given)} where text belongs; see docs/manifest.md"
    return f"is read by YAML as {kind_of(given)}; put it in quotes"


def kind_of(given: Any) -> str:
    """Return what a YAML value is, in words, with the value itself where it is one of a single line."""
    if given is None:
        return "empty"
    if isinstance(given, list | dict):
        return "a list" if isinstance(given, list) else "a mapping"
    if isinstance(given, bool):
        return str(given).lower()
    name = {int: "the number", float: "the number", str: "the text"}.get(type(given), f"a {type(given).__name__}")
    return f"{name} {quoted(given)}"


def _unknown_key(details: ErrorDetails) -> str:
    *place, key = map(str, details["loc"])
    holder = next((name for name in reversed(place) if not name.isdigit()), "")
    here = list(_MODELS[holder].model_fields)
    close = difflib.get_close_matches(key, here, n=1)
    elsewhere = [name for name, model in _MODELS.items() if name and key in model.model_fields]
    if close:
        return f"is not a known field; did you mean {close[0]}?"
    if elsewhere:
        return f"is not a field here; it belongs under {' or '.join(elsewhere)}"
    return f"is not a known field; remove it (the fields here are {', '.join(here)})"


def _wrong_choice(details: ErrorDetails) -> str:
    allowed = details.get("ctx", {}).get("expected", "")
    return f"{quoted(details['input'])} is not possible here; use {allowed.replace(chr(39), '')}"


_MODELS: dict[str, type[BaseModel]] = {
    "": Manifest,
    "variants": Variant,
    "source": Reference,
    "base": Reference,
    "adapter": AdapterSettings,
    "expect": Expectation,
    "verification": VerificationSettings,
    "sets": RequestSet,
    "dataset": Dataset,
    "fp8": Fp8Base,
    "card": CardSettings,
    "sign": Signer,
    "sigstore": SigstoreSigner,
}
_EXPLANATIONS: dict[str, Callable[[ErrorDetails], str]] = {
    "missing": lambda details: f"is missing; add {details['loc'][-1]}: (docs/manifest.md shows each field)",
    "extra_forbidden": _unknown_key,
    "invalid_key": _unknown_key,
    "literal_error": _wrong_choice,
    "string_type": _not_text,
    "int_type": _wrong_kind("a whole number"),
    "bool_type": _wrong_kind("true or false"),
    "greater_than": lambda details: f"is {quoted(details['input'])}; write a whole number above zero",
    "model_type": _wrong_kind("a mapping of fields"),
    "tuple_type": _wrong_kind("a list"),
    "value_error": lambda details: str(details["msg"]).removeprefix("Value error, "),
}
