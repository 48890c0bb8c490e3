"""Answers on disk: one file for each model and request file, to which batches are added as they are answered.

A line is one whole batch: its number in the request file, and for each request and question the logits as they came
(float32, little endian, base64) or why there are none; and, after a tab, the digest of all that and of what the answers
rest on. A line that was torn by a kill, or altered since, is dropped, and that batch is answered again as it was
composed before: nothing of a logit can depend on where a run stopped.
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
"""Logits of shape (options,), float32; or, as text, why there are none."""
BatchAnswers = Sequence[Sequence[Answer]]
"""The answers to one batch: for each request, one for each of its questions."""


@dataclass(frozen=True, slots=True)
class AnswerLog:
    """The answers of one model to one request file.

    Attributes:
        folder: where the answers of all models lie.
        key: digest of all that the answers rest on; the file is named after it.
    """

    folder: Path
    key: str

    @property
    def file(self) -> Path:
        """The file that holds the answers."""
        return self.folder / f"{self.key}.jsonl"

    def mend(self) -> int:
        """Remove the lines that are not as they were written, and return how many there were."""
        lines = list(self._lines())
        whole = [line for line in lines if self._number(line) is not None]
        if len(whole) < len(lines):
            with atomic(self.file, size=sum(map(len, whole))) as partial:
                partial.write_bytes(b"".join(whole))
        return len(lines) - len(whole)

    def finished(self) -> frozenset[int]:
        """Return the numbers of the batches that are answered, after dropping what is not whole."""
        self.mend()
        return frozenset(self._offsets())

    def add(self, batch: BatchAnswers, *, number: int) -> None:
        """Add the answers to the batch of this number, in whatever order they come.

        When this returns, they are safe on disk.

        Raises:
            NoRoomError: the disk is full.
        """
        line = self._line(batch, number)
        with room_in(self.folder, name=self.file.name, size=len(line)):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> Iterator[Sequence[Answer]]:
        """Yield the answers to each request, in the order of the requests.

        Raises:
            VerificationError: a line was altered after `finished` was asked.
        """
        with self.file.open("rb") as lines:
            for number, offset in sorted(self._offsets().items()):
                lines.seek(offset)
                line = lines.readline()
                if self._number(line) != number:
                    raise self._changed()
                answers = json.loads(line.partition(_TAB)[0])["answers"]
                yield from ([_unpacked(one) for one in request] for request in answers)

    def _lines(self) -> Iterator[bytes]:
        if self.file.is_file():
            with self.file.open("rb") as lines:
                yield from lines

    def _offsets(self) -> dict[int, int]:
        """Return where each batch starts in the file, in bytes, by its number.

        Raises:
            VerificationError: a line is not as it was written.
        """
        offsets: dict[int, int] = {}
        end = 0
        for line in self._lines():
            number = self._number(line)
            if number is None:
                raise self._changed()
            offsets[number] = end
            end += len(line)
        return offsets

    def _line(self, batch: BatchAnswers, number: int) -> bytes:
        answers = [[_packed(one) for one in request] for request in batch]
        text = json.dumps({"batch": number, "answers": answers}, separators=(",", ":")).encode()
        return text + _TAB + self._digest(text) + b"\n"

    def _number(self, line: bytes) -> int | None:
        """Return the number of the batch that a line holds; None where the line is not as it was written."""
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
