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

    def finished(self) -> int:
        """How many batches are answered; a torn end is cut off."""
        if not self.file.is_file():
            return 0
        count, end = 0, 0
        with self.file.open("rb") as lines:
            for line in lines:
                if not _is_whole(line, count):
                    break
                count, end = count + 1, end + len(line)
        if end < self.file.stat().st_size:
            os.truncate(self.file, end)
        return count

    def add(self, batch: Answered, *, place: int) -> None:
        """Add the batch of this place; when this returns it is safe on disk.

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
        """The answers of each request, in order."""
        with self.file.open("rb") as lines:
            for line in lines:
                yield from ([_unpacked(one) for one in request] for request in json.loads(line)["answers"])


def _line(batch: Answered, place: int) -> bytes:
    answers = [[_packed(one) for one in request] for request in batch]
    return json.dumps({"batch": place, "answers": answers}, separators=(",", ":")).encode() + b"\n"


def _is_whole(line: bytes, place: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["batch"] == place)
    except (ValueError, KeyError, TypeError):
        return False


def _packed(answer: Answer) -> dict[str, str]:
    if isinstance(answer, str):
        return {"failure": answer}
    return {"logits": base64.b64encode(answer.astype("<f4").tobytes()).decode()}


def _unpacked(stored: dict[str, Any]) -> Answer:
    if "failure" in stored:
        return str(stored["failure"])
    return np.frombuffer(base64.b64decode(stored["logits"]), dtype="<f4")
