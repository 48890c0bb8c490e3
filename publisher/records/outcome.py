"""What a run did, for the terminal and for `--json`."""

from publisher.records.extraction import ExtractionSummary
from publisher.records.loaders import LoaderVerdict
from publisher.records.publication import CommitPlan, PushOutcome, Signing
from publisher.records.record import Each, Record
from publisher.records.validation import Validation
from publisher.records.verification import Verification


class VariantOutcome(Record):
    """One variant after a run; `reused` names the stages whose earlier result still held."""

    path: str
    label: str
    reused: Each[str]
    summary: ExtractionSummary | None
    validation: Validation | None
    verification: Verification | None
    loaders: Each[LoaderVerdict] = ()


class Outcome(Record):
    """What a run did; the document that `--json` prints."""

    manifest: str
    staged: str
    stages: Each[str]
    variants: Each[VariantOutcome]
    card_changed: bool | None
    signature: Signing | None
    plan: CommitPlan | None
    push: PushOutcome | None
