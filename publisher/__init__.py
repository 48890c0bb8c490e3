"""publisher: takes the LoRA adapter back out of a merged fine-tune, proves it equal, and publishes it.

    import publisher

    result = publisher.extract(tuned="org/tuned", base="org/base")   # no manifest needed
    result.save("adapter")
    publisher.run("manifests/demo.yaml", dry_run=True)               # the whole job
    publisher.audit("moondream/clef-lora").failed                    # what speaks against a release

docs/api.md describes every name below. They are imported when they are first used: `import publisher` alone takes no
time, and torch is imported where tensors are touched. Nothing here prints. Every exception is a `PublisherError`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from publisher.errors import (
    AuditError,
    BusyError,
    CardError,
    EngineError,
    ExtractionError,
    FaultError,
    FetchError,
    HubError,
    LibraryError,
    ManifestError,
    MergeError,
    MissingFileError,
    MissingRepositoryError,
    MissingRevisionError,
    NoRoomError,
    PatternError,
    PublisherError,
    PushError,
    SigningError,
    StaleParentError,
    SystemTroubleError,
    UncheckablePatternError,
    UncheckableSignatureError,
    UnclearAnswerError,
    ValidationError,
    VerificationError,
)

__version__ = "0.3.0"

__all__ = [
    "Audit",
    "AuditError",
    "BusyError",
    "CardError",
    "Check",
    "EngineError",
    "ExpertTensor",
    "ExtractedAdapter",
    "Extraction",
    "ExtractionError",
    "ExtractionSummary",
    "FaultError",
    "FetchError",
    "HubError",
    "LibraryError",
    "LoaderVerdict",
    "Manifest",
    "ManifestError",
    "MergeError",
    "MissingFileError",
    "MissingRepositoryError",
    "MissingRevisionError",
    "ModuleExtraction",
    "NoRoomError",
    "Outcome",
    "PatternError",
    "Progress",
    "PublisherError",
    "PushError",
    "SigningError",
    "StageOptions",
    "StaleParentError",
    "SystemTroubleError",
    "UncheckablePatternError",
    "UncheckableSignatureError",
    "UnclearAnswerError",
    "Validation",
    "ValidationError",
    "VariantOutcome",
    "Verification",
    "VerificationError",
    "__version__",
    "audit",
    "extract",
    "load_manifest",
    "run",
    "validate",
    "verify",
]

if TYPE_CHECKING:
    from publisher.api.auditing import audit
    from publisher.api.extraction import ExtractedAdapter, extract
    from publisher.api.manifests import load_manifest
    from publisher.api.runs import StageOptions, run, validate, verify
    from publisher.manifest.schema import Manifest
    from publisher.records.audit import Audit, Check
    from publisher.records.extraction import ExpertTensor, Extraction, ExtractionSummary, ModuleExtraction
    from publisher.records.loaders import LoaderVerdict
    from publisher.records.outcome import Outcome, VariantOutcome
    from publisher.records.progress import Progress
    from publisher.records.validation import Validation
    from publisher.records.verification import Verification
else:  # a type checker must not see it: with it, no misspelt name would be an error
    _HOMES: Final = {
        "publisher.api.auditing": ("audit",),
        "publisher.api.extraction": ("ExtractedAdapter", "extract"),
        "publisher.api.manifests": ("load_manifest",),
        "publisher.api.runs": ("StageOptions", "run", "validate", "verify"),
        "publisher.manifest.schema": ("Manifest",),
        "publisher.records.audit": ("Audit", "Check"),
        "publisher.records.extraction": ("ExpertTensor", "Extraction", "ExtractionSummary", "ModuleExtraction"),
        "publisher.records.loaders": ("LoaderVerdict",),
        "publisher.records.outcome": ("Outcome", "VariantOutcome"),
        "publisher.records.progress": ("Progress",),
        "publisher.records.validation": ("Validation",),
        "publisher.records.verification": ("Verification",),
    }
    _HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        """Import a name of the API when it is first asked for."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
        return found

    def __dir__() -> list[str]:
        """List the API's names, also those that have not been imported yet."""
        return sorted({*globals(), *__all__})
