"""What a push is to write, what it wrote, what was read back, and the signature."""

from typing import Literal

from publisher.records.record import Count, Each, Record

Change = Literal["added", "changed", "same", "deleted", "not compared"]


class Operation(Record):
    """One file of the commit; `size` is absent for a file that would be deleted."""

    path: str
    size: Count | None
    sha256: str | None
    change: Change


class CommitPlan(Record):
    """The commit that push would make.

    Attributes:
        repo: where it would go.
        parent: the head it was compared with; absent for a new repository, or where none was reached.
        compared_with: the same in words.
        operations: every staged file, and every file of an earlier release that would go.
    """

    repo: str
    parent: str | None
    compared_with: str
    operations: Each[Operation]


class ReadBack(Record):
    """What was read back from the published commit, from an empty cache."""

    files: Count
    adapters: Count


Result = Literal["no changes", "committed", "pull request"]


class CardChange(Record):
    """Whether rendering the card changed it or one of its charts."""

    changed: bool


class Pushed(Record):
    """What push did.

    Attributes:
        hub: the Hub's address; a rehearsal says `local Hub`.
        result: what happened on the Hub.
        commit: the commit that holds the release now.
        url: where it can be seen.
        tag: the tag that points to it.
        recovered: the answer to the commit was lost, and the commit was found by reading the repository again.
    """

    hub: str
    result: Result
    commit: str
    url: str
    tag: str | None
    recovered: bool


class PushOutcome(Pushed):
    """What push did, and what was read back of it.

    Attributes:
        read_back: what was read back from that commit; absent where the run ended before.
    """

    read_back: ReadBack | None


class Signing(Record):
    """The signature in the staged tree.

    Attributes:
        result: whether an earlier signature still held, one was made, or there is none.
        signer: who the manifest says must sign.
        why: why there is none.
    """

    result: Literal["kept", "signed", "missing"]
    signer: str
    why: str | None
