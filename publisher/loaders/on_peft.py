"""PEFT: it is run, on the base's class without weights; where validation has just done that, its result counts."""

from importlib import metadata

from publisher.loaders.executed import Trial, empty_base, left_out, on_text_only, text_only, trial, with_peft
from publisher.loaders.finding import packing_note, verdict
from publisher.loaders.subject import Subject
from publisher.records.loaders import LoaderVerdict
from publisher.records.validation import Validation


def judge(subject: Subject, validation: Validation | None) -> LoaderVerdict:
    """Return the verdict on PEFT; a validation that passed has loaded every tensor, at scale 1 in every module.

    Raises:
        ValidationError: transformers has no class for this base.
    """
    seen = Trial((), left_out(subject)) if validation else tried(subject)
    version = validation.packages["peft"] if validation else metadata.version("peft")
    other = text_only(subject)
    notes = list(seen.notes)
    if not validation and not seen.unchecked and all(one.silent for one in seen.findings):
        notes.append(packing_note(subject))
    if validation and validation.incomparable:
        notes.append(f"its outputs were not compared with the source's: {validation.incomparable}")
    if other:
        name, model = other
        notes.append(on_text_only(subject, with_peft(subject, model), name=name, by="PEFT"))
    return verdict("PEFT", version, basis="executed", findings=seen.findings, notes=notes, unknown=seen.unchecked)


def tried(subject: Subject) -> Trial:
    """Load the adapter with PEFT on its own class, and return what became of it.

    Raises:
        ValidationError: transformers has no class for this base.
    """
    return trial(subject, with_peft(subject, empty_base(subject)), by="PEFT")
