"""How a check is made: a claim about a release is run, and its outcome becomes data.

A claim is a function that returns what it saw, or raises: `AuditError` (or another error of this project) for what
speaks against the release, `UncheckedError` for why it cannot tell. The Hub out of reach counts as the latter. Any
other exception is a finding too: PEFT, transformers and arithmetic may stumble over files of any origin, and that must
not keep the other checks from running.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from publisher.border.escape import for_terminal
from publisher.errors import AuditError, HubError, PublisherError, UncheckablePatternError, counted, listed
from publisher.records.audit import Check
from publisher.records.extraction import Extraction

_T = TypeVar("_T")


class UncheckedError(PublisherError):
    """Why something cannot be checked here."""


def checked(name: str, claim: Callable[[], str], *, folder: Path, variant: str = "") -> Check:
    """Run one claim about a release, and return its outcome as data.

    Args:
        name: of the check.
        claim: returns what it saw, or raises what speaks against the release.
        folder: paths below it are told relative to it.
        variant: the variant that the claim is about; empty for the release as a whole.

    Returns:
        The check, with control characters escaped.
    """
    status: Literal["passed", "failed", "not checked"] = "passed"
    try:
        detail = claim()
    except (UncheckedError, UncheckablePatternError, HubError) as error:
        status, detail = "not checked", error.found
    except PublisherError as error:
        expected = f"; expected {error.expected}" if error.expected and "\n" not in error.found else ""
        status, detail = "failed", f"{error.found.rstrip()}{expected}"
    except Exception as error:  # noqa: BLE001 - see the module's first words
        status, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    told = detail.replace(f"{folder}/", "")
    return Check(name=name, variant=variant, status=status, detail=for_terminal(told, lines=True))


def needed(value: _T | None, what: str) -> _T:
    """Return the value that a claim rests on.

    Raises:
        UncheckedError: it is not there; `what` says what that is.
    """
    if value is None:
        raise UncheckedError(f"there is no readable {what}")
    return value


def require_none(problems: Sequence[str]) -> None:
    """Raise an error that names whatever speaks against the claim.

    Raises:
        AuditError: there is at least one problem: one as it stands, several a line each.
    """
    if len(problems) == 1:
        raise AuditError(problems[0])
    if problems:
        raise AuditError(f"{len(problems)} differences:\n{listed(problems)}")


def adapted_places(extraction: Extraction) -> str:
    """Return what an adapter has factors for, in words: `12 modules`, or `12 modules and 4 parameters`."""
    experts = f" and {counted(len(extraction.experts), 'parameter')}" if extraction.experts else ""
    return f"{len(extraction.modules)} modules{experts}"
