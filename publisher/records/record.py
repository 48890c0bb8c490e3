"""What every artefact has in common.

Every record is frozen. Those named in an artefact hold no time, no host name and no path of this machine, and
their figures are rounded to six significant digits, so that equal work means equal bytes. No tensor ever enters
a record.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from publisher.border.escape import for_terminal
from publisher.border.files import read_regular
from publisher.border.json_text import parse_json
from publisher.border.limits import LIMITS
from publisher.border.names import tensor_name
from publisher.errors import FetchError
from publisher.records.files import canonical_json, write_text

SCHEMA_VERSION: Literal[1] = 1
_PARTS, _PART = 8, 80  # of a place in a message, and characters of each


def six_digits(value: float) -> float:
    """Round a figure to six significant digits, as artefacts have it."""
    return float(f"{value:.6g}")


_T = TypeVar("_T")
_LARGEST = 1e30  # of a figure: whatever is drawn or divided stays finite
Figure = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), AfterValidator(six_digits)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
TensorName = Annotated[str, AfterValidator(tensor_name)]
Each = Annotated[tuple[_T, ...], FailFast()]  # the first that is wrong ends it: millions of complaints fill the memory
Shape = tuple[int, ...]


class Record(BaseModel):
    """Frozen, unknown fields refused; reads and writes canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> str:
        """Return the record as canonical JSON, with one newline at the end."""
        return canonical_json(self.model_dump(mode="json"))

    def write(self, path: Path) -> None:
        """Write the canonical JSON atomically."""
        write_text(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record back.

        Raises:
            FetchError: where the file is missing, damaged, no regular file, or of another schema.
        """
        try:
            return cls.model_validate(parse_json(read_regular(path, limit=LIMITS.json_bytes)))
        except FileNotFoundError:
            raise FetchError(f"{path} does not exist", next_step="run the stage that writes it") from None
        except OSError as error:
            raise FetchError(f"{path} cannot be read: {error.strerror}", next_step="name another folder") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = for_terminal(".".join(str(part)[:_PART] for part in first["loc"][:_PARTS])) or "the file"
            raise FetchError(
                f"{path}: {place}: {for_terminal(first['msg'])}",
                expected=f"a {cls.__name__} of schema version {SCHEMA_VERSION}",
                next_step="delete the file and run the stage that writes it",
            ) from None
        except ValueError as error:
            raise FetchError(
                f"{path}: {error}", expected="JSON as this tool writes it", next_step="run the stage that writes it"
            ) from None
