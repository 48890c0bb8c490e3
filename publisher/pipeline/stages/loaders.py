"""Loaders: the written adapter is judged by the rules of each loader, and the verdicts become loaders.json.

They are data for the reader of the card: a loader that refuses the adapter, or takes it wrongly, is no error here. No
weights of the base are read, only its config.json.
"""

from typing import TYPE_CHECKING

from publisher.adapters.base_config import base_config
from publisher.loaders import judge
from publisher.loaders.subject import Base, read_subject
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, LOADERS
from publisher.records.files import sha256_of
from publisher.records.loaders import Loaders
from publisher.records.validation import Validation

if TYPE_CHECKING:
    from publisher.pipeline.sites import VariantSite


def loaders(site: "VariantSite") -> Loaders:
    """Write loaders.json beside the adapter, which has passed a validation: the strict load of that one counts.

    Raises:
        FetchError: the adapter's files cannot be read.
        HubError: the base's config.json cannot be had.
        ValidationError: transformers has no class for this base.
    """
    variant, staged = site.variant, site.staged
    site.progress(f"trying loaders on {variant.label}")
    base = Base(base_config(variant), variant.model_class)
    subject = read_subject(staged, base, subfolder=variant.folder)
    found = Loaders(
        path=variant.path,
        adapter_sha256=sha256_of(staged / ADAPTER),
        config_sha256=sha256_of(staged / ADAPTER_CONFIG),
        verdicts=judge(subject, site.result("validate", Validation)),
    )
    found.write(staged / LOADERS)
    return found
