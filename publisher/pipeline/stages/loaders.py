"""Loaders: the written adapter is judged by the rules of each loader, and the verdicts become loaders.json.

They are data for the reader of the card: a loader that refuses the adapter, or takes it wrongly, is no error here. No
weights of the base are read, only its config.json.
"""

from pathlib import Path

from publisher.loaders import judge
from publisher.loaders.subject import Base, read_subject
from publisher.manifest.schema import Variant
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, LOADERS
from publisher.records.files import sha256_of
from publisher.records.loaders import Loaders
from publisher.records.validation import Validation


def try_loaders(variant: Variant, *, staged: Path, base: Path, validation: Validation | None) -> Loaders:
    """Write loaders.json beside the adapter.

    Args:
        variant: the manifest's entry.
        staged: the variant's folder in the staged tree, with the adapter's two files.
        base: a folder with the base's config.json.
        validation: one that these very files have passed, whose strict load by PEFT counts; None has PEFT load them.

    Returns:
        What was written.

    Raises:
        FetchError: the adapter's files cannot be read.
        ValidationError: transformers has no class for this base.
    """
    subject = read_subject(staged, Base(base, variant.model_class), subfolder=variant.folder)
    found = Loaders(
        path=variant.path,
        adapter_sha256=sha256_of(staged / ADAPTER),
        config_sha256=sha256_of(staged / ADAPTER_CONFIG),
        verdicts=judge(subject, validation),
    )
    found.write(staged / LOADERS)
    return found
