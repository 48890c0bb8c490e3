"""transformers: its own `load_adapter` is run, on the base's class without weights."""

from importlib import metadata

from publisher.loaders.executed import empty_base, on_text_only, text_only, trial, with_transformers
from publisher.loaders.finding import finding, verdict
from publisher.loaders.subject import Subject
from publisher.records.loaders import LoaderFinding, LoaderVerdict


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict on transformers' `load_adapter`.

    Raises:
        ValidationError: transformers has no class for this base.
    """
    seen = trial(subject, with_transformers(subject, empty_base(subject)), by="load_adapter")
    other = text_only(subject)
    notes = list(seen.notes)
    if other:
        name, model = other
        notes.append(on_text_only(subject, with_transformers(subject, model), name=name, by="load_adapter"))
    return verdict(
        "transformers",
        metadata.version("transformers"),
        basis="executed",
        findings=[*seen.findings, *_invocation(subject)],
        notes=notes,
        unknown=seen.unchecked,
    )


def _invocation(subject: Subject) -> list[LoaderFinding]:
    """Find an aLoRA: PEFT's own model tells its layers where the invocation begins, and here nobody does."""
    if not subject.config.get("alora_invocation_tokens"):
        return []
    what = "alora_invocation_tokens is set, which counts in PEFT's own model alone: the adapter changes nothing"
    modules = len(subject.factors)
    return [finding("silent no-op", what, modules=modules, silent=True, remedy="load it with PeftModel")]
