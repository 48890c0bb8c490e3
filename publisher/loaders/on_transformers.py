"""transformers: its own `load_adapter` is run, on the base's class without weights."""

from importlib import metadata

from publisher.loaders.executed import empty_base, findings, on_text_only, text_only, with_transformers
from publisher.loaders.finding import verdict
from publisher.loaders.subject import Subject
from publisher.records.loaders import LoaderVerdict


def judge(subject: Subject) -> LoaderVerdict:
    """Return the verdict on transformers' `load_adapter`.

    Raises:
        ValidationError: transformers has no class for this base.
    """
    reached = with_transformers(subject, empty_base(subject))
    other = text_only(subject)
    notes = []
    if other:
        name, model = other
        notes.append(on_text_only(subject, with_transformers(subject, model), name=name, by="load_adapter"))
    return verdict(
        "transformers",
        metadata.version("transformers"),
        basis="executed",
        findings=findings(subject, reached, by="load_adapter"),
        notes=notes,
    )
