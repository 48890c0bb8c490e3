"""Answers on disk: one file for each model and request file, to which batches are added as they are answered.

A line is one batch, whole: its place, and per request and question the logits as they came (float32, little endian,
base64) or why there are none; and, after a tab, the digest of all that and of what the answers rest on. A line that was
torn by a kill, or altered since, is dropped, and that batch is answered again as it was composed before: nothing of
a logit can depend on where a run stopped.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from publisher.errors import VerificationError
from publisher.records.files import atomic, room_in

_TAB = b"\t"  # no JSON text holds one as it is

Answer = NDArray[np.float32] | str
"""Logits of shape (k,), or why there are none."""
Answered = Sequence[Sequence[Answer]]
"""Of one batch: per request, per question."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of one model to one request file; `key` is the digest of all they rest on, and the file's name."""

    folder: Path
    key: str

    @property
    def file(self) -> Path:
        """Where they are."""
        return self.folder / f"{self.key}.jsonl"

    def mend(self) -> int:
        """Drop the lines that are not as they were written; return how many there were."""
        lines = list(self._lines())
        whole = [line for line in lines if self._place(line) is not None]
        if len(whole) < len(lines):
            with atomic(self.file, size=sum(map(len, whole))) as partial:
                partial.write_bytes(b"".join(whole))
        return len(lines) - len(whole)

    def finished(self) -> frozenset[int]:
        """The places of the batches that are answered; what is not whole is dropped."""
        self.mend()
        return frozenset(self._places())

    def add(self, batch: Answered, *, place: int) -> None:
        """Add the batch of this place, in whatever order they come; when this returns it is safe on disk.

        Raises:
            NoRoomError: the disk is full.
        """
        line = self._line(batch, place)
        with room_in(self.folder, name=self.file.name, size=len(line)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> Iterator[Sequence[Answer]]:
        """The answers of each request, in the order of the requests.

        Raises:
            VerificationError: a line was altered after `finished` was asked.
        """
        with self.file.open("rb") as lines:
            for place, start in sorted(self._places().items()):
                lines.seek(start)
                line = lines.readline()
                if self._place(line) != place:
                    raise self._changed()
                answers = json.loads(line.partition(_TAB)[0])["answers"]
                yield from ([_unpacked(one) for one in request] for request in answers)

    def _lines(self) -> Iterator[bytes]:
        if self.file.is_file():
            with self.file.open("rb") as lines:
                yield from lines

    def _places(self) -> dict[int, int]:
        """Where each batch starts in the file.

        Raises:
            VerificationError: a line is not as it was written.
        """
        places: dict[int, int] = {}
        end = 0
        for line in self._lines():
            if (place := self._place(line)) is None:
                raise self._changed()
            places[place] = end
            end += len(line)
        return places

    def _line(self, batch: Answered, place: int) -> bytes:
        answers = [[_packed(one) for one in request] for request in batch]
        text = json.dumps({"batch": place, "answers": answers}, separators=(",", ":")).encode()
        return text + _TAB + self._digest(text) + b"\n"

    def _place(self, line: bytes) -> int | None:
        """Return the place of the batch that a line holds; None where it is not as it was written."""
        text, tab, _ = line.partition(_TAB)
        whole = line == text + tab + self._digest(text) + b"\n"
        return int(json.loads(text)["batch"]) if whole else None

    def _digest(self, text: bytes) -> bytes:
        return hashlib.sha256(self.key.encode() + text).hexdigest().encode()

    def _changed(self) -> VerificationError:
        return VerificationError(
            f"{self.file} was changed while this run was at work",
            expected="the answers that this run has checked or added",
            next_step="run the same command again: what is not whole is asked again",
        )


def _packed(answer: Answer) -> dict[str, str]:
    if isinstance(answer, str):
        return {"failure": answer}
    return {"logits": base64.b64encode(answer.astype("<f4").tobytes()).decode()}


def _unpacked(stored: dict[str, Any]) -> Answer:
    if "failure" in stored:
        return str(stored["failure"])
    return np.frombuffer(base64.b64decode(stored["logits"]), dtype="<f4")
