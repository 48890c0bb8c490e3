"""Every error a user can meet, and how it reads.

    PublisherError            exit 1
    ├── ManifestError         exit 2: the manifest or the command line is wrong
    ├── BusyError             another run works on the same output
    ├── NoRoomError           the disk is full
    ├── SystemTroubleError    the system refuses: a path, a permission, memory
    ├── LibraryError          a library, or code of a release, failed
    ├── FaultError            a fault of this tool itself
    ├── EngineError           the cluster cannot be joined, or its workers fail
    ├── FetchError            a checkpoint is missing, damaged or not at its pin
    ├── HubError              the Hub cannot be reached, or refused
    │   ├── MissingFileError        the repository has no such file
    │   ├── MissingRevisionError    the repository has no such commit, branch or tag
    │   ├── MissingRepositoryError  no such repository, or none this token may see
    │   ├── StaleParentError        the branch has moved since it was looked at
    │   └── UnclearAnswerError      no answer, or one that does not say whether a write took effect
    ├── ExtractionError       the two checkpoints do not hold a LoRA that can be taken out
    ├── ValidationError       the written adapter does not do what extraction.json says
    ├── VerificationError     base + adapter does not answer as the released model does
    ├── MergeError            base + adapter cannot be written as one checkpoint
    ├── CardError             the card cannot be rendered, or is stale
    ├── PushError             the commit cannot be made
    ├── SigningError          the release cannot be signed, or its signature does not hold
    │   └── UncheckableSignatureError  it cannot be told here whether a signature holds
    ├── AuditError            something speaks against a published release
    └── PatternError          a pattern of an adapter is no regular expression
        └── UncheckablePatternError  it cannot be matched here in bounded time

A message is one short paragraph: what was found, what was expected, what to do next. Only `cli.main`
catches these; nothing below it prints or exits. What is raised otherwise becomes one of them there (`causes`).
"""

from collections.abc import Iterable
from typing import Any, ClassVar

_SHOWN = 12


class PublisherError(Exception):
    """What was found, what was expected, and the next step, as one paragraph."""

    exit_code: ClassVar[int] = 1

    def __init__(self, found: str, *, expected: str = "", next_step: str = "") -> None:
        """Keep the three parts; an empty part is left out of the text."""
        self.found = found
        self.expected = expected
        self.next_step = next_step
        super().__init__(found)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what rebuilds the error in another process, with all three parts."""
        return _remade, (type(self), (self.found, self.expected, self.next_step))

    def __str__(self) -> str:
        after = (("Expected ", self.expected), ("Next: ", self.next_step))
        sentences = [f"{opening}{part.rstrip('.')}." for opening, part in after if part]
        if self.found.endswith("\n"):  # a list, on lines of its own
            return self.found + " ".join(sentences)
        return " ".join([f"{self.found.rstrip('.')}.", *sentences])


def _remade(kind: type[PublisherError], parts: tuple[str, str, str]) -> PublisherError:
    found, expected, next_step = parts
    return kind(found, expected=expected, next_step=next_step)


class ManifestError(PublisherError):
    """A manifest or the command line is wrong."""

    exit_code = 2


class BusyError(PublisherError):
    """Another run works on the same output."""


class NoRoomError(PublisherError):
    """The disk is full."""


class SystemTroubleError(PublisherError):
    """The system refuses: a path, a permission, memory."""


class LibraryError(PublisherError):
    """A library, or code that a release brings, failed."""


class FaultError(PublisherError):
    """A fault of this tool itself."""


class EngineError(PublisherError):
    """The cluster cannot be joined, or its workers fail again and again."""


class FetchError(PublisherError):
    """A checkpoint is missing, damaged or not at its pin."""


class HubError(PublisherError):
    """The Hub cannot be reached, or refused."""


class MissingFileError(HubError):
    """The repository has no such file at this commit."""


class MissingRevisionError(HubError):
    """The repository has no such commit, branch or tag."""


class MissingRepositoryError(HubError):
    """There is no such repository, or none that this token may see."""


class StaleParentError(HubError):
    """The branch has moved since it was looked at; nothing was written."""


class UnclearAnswerError(HubError):
    """No answer, or one that does not say whether a write took effect."""


class ExtractionError(PublisherError):
    """The two checkpoints do not hold a LoRA that can be taken out."""


class ValidationError(PublisherError):
    """The written adapter does not do what extraction.json says."""


class VerificationError(PublisherError):
    """Base + adapter does not answer as the released model does."""


class MergeError(PublisherError):
    """Base + adapter cannot be written as one checkpoint."""


class CardError(PublisherError):
    """The card cannot be rendered, or is stale."""


class PushError(PublisherError):
    """The commit cannot be made."""


class SigningError(PublisherError):
    """The release cannot be signed, or its signature does not hold."""


class UncheckableSignatureError(SigningError):
    """It cannot be told here whether a signature holds."""


class AuditError(PublisherError):
    """Something speaks against a published release."""


class PatternError(PublisherError):
    """A pattern of an adapter is no regular expression."""


class UncheckablePatternError(PatternError):
    """It cannot be matched here in bounded time."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'s'[: number != 1]}"


def listed(lines: Iterable[str]) -> str:
    """List names for a message, one on a line: the first dozen, and how many more there are."""
    every = [line.replace("\n", r"\n") for line in lines]  # a name of several lines is no list of several names
    more = [f"  and {len(every) - _SHOWN} more"] if len(every) > _SHOWN else []
    return "\n".join([*(f"  {line}" for line in every[:_SHOWN]), *more])


def shown(value: object, *, width: int = 80) -> str:
    """Return a JSON value for a message, cut where it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= width else f"{text[: width - 1]}…"
