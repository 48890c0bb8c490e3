"""How often a unit may fail, and with what the run ends then.

What a job says about its unit (its weights hold NaN, a model does not answer) would be the same on any worker, and
ends the run at once. What another worker may not meet is tried again: a lost process or machine, a file or a Hub that
cannot be reached. The third failure for one reason ends the run by the name of its unit.
"""

from collections import Counter
from dataclasses import dataclass, field

from publisher.errors import EngineError, FetchError, HubError, NoRoomError, PublisherError

TRIES = 3
_PASSING = (EngineError, FetchError, HubError, NoRoomError)


@dataclass(frozen=True, slots=True)
class Failures:
    """Counts failures by unit and reason."""

    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, unit: str, error: BaseException) -> None:
        """Count a failure, and raise an error if the run must end with it.

        Args:
            unit: its label.
            error: what went wrong on the worker, not what the remote call made of it.

        Raises:
            PublisherError: the error itself, where it says something about the unit.
            EngineError: it is the third failure of this unit for this reason.
        """
        if isinstance(error, PublisherError) and not isinstance(error, _PASSING):
            raise error
        reason = str(error) if isinstance(error, PublisherError) else reason_of(error)
        self.seen[unit, reason] += 1
        if self.seen[unit, reason] >= TRIES:
            raise EngineError(
                f"{unit} failed {TRIES} times: {reason}",
                next_step="see docs/cluster.md; what was finished is kept, and the same command goes on from there",
            ) from error


def reason_of(error: BaseException) -> str:
    """Return the kind of an error and its first line, without what differs from one machine to the next."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}".rstrip(": ")
