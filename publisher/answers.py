"""Answers on disk: one file for each model and request file, to which batches are added as they are answered.

A line is one batch, whole: its place, and per request and question the logits as they came (float32, little endian,
base64) or why there are none. A run that was killed leaves at worst a torn last line, which is dropped, and that
batch is answered again as it was composed before: nothing of a logit can depend on where a run stopped.
"""

import base64
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from publisher.files import room_in

Answer = NDArray[np.float32] | str
"""Logits of shape (k,), or why there are none."""
Answered = Sequence[Sequence[Answer]]
"""Of one batch: per request, per question."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one model to one request file; the file's name is the digest of all they rest on."""

    file: Path

    def finished(self) -> frozenset[int]:
        """The places of the batches that are answered; a torn end is cut off."""
        places, whole = self._places()
        if self.file.is_file() and whole < self.file.stat().st_size:
            os.truncate(self.file, whole)
        return frozenset(places)

    def add(self, batch: Answered, *, place: int) -> None:
        """Add the batch of this place, in whatever order they come; when this returns it is safe on disk.

        Raises:
            NoRoomError: the disk is full.
        """
        line = _line(batch, place)
        with room_in(self.file.parent, name=self.file.name, size=len(line)):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> Iterator[Sequence[Answer]]:
        """The answers of each request, in the order of the requests."""
        places, _ = self._places()
        with self.file.open("rb") as lines:
            for _, start in sorted(places.items()):
                lines.seek(start)
                answers = json.loads(lines.readline())["answers"]
                yield from ([_unpacked(one) for one in request] for request in answers)

    def _places(self) -> tuple[dict[int, int], int]:
        """Where each batch starts in the file, and where the last whole one ends."""
        places: dict[int, int] = {}
        end = 0
        if self.file.is_file():
            with self.file.open("rb") as lines:
                for line in lines:
                    if (place := _place(line)) is None:
                        break
                    places[place] = end
                    end += len(line)
        return places, end


def _line(batch: Answered, place: int) -> bytes:
    answers = [[_packed(one) for one in request] for request in batch]
    return json.dumps({"batch": place, "answers": answers}, separators=(",", ":")).encode() + b"\n"


def _place(line: bytes) -> int | None:
    """The place of the batch that a line holds; None where it is torn."""
    try:
        return int(json.loads(line)["batch"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


def _packed(answer: Answer) -> dict[str, str]:
    if isinstance(answer, str):
        return {"failure": answer}
    return {"logits": base64.b64encode(answer.astype("<f4").tobytes()).decode()}


def _unpacked(stored: dict[str, Any]) -> Answer:
    if "failure" in stored:
        return str(stored["failure"])
    return np.frombuffer(base64.b64decode(stored["logits"]), dtype="<f4")
