"""What an audit found."""

from typing import Literal

from publisher.records.record import Each, Record


class Check(Record):
    """One check of an audit.

    Attributes:
        name: what is checked.
        variant: path of the variant it concerns; empty for the repository as a whole.
        status: `not checked` says in `detail` why not.
        detail: what was seen; of a failed check, what was found and what was expected, a line each.
    """

    name: str
    variant: str
    status: Literal["passed", "failed", "not checked"]
    detail: str


class Audit(Record):
    """Every check of one release; `revision` is absent for a local folder."""

    repo: str
    revision: str | None
    checks: Each[Check]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")
