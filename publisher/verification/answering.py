"""Asking one model batches of requests: the unit of work of a verification, on this machine or on another.

The model is loaded once for each worker. Sent elsewhere, the job takes the adapter along, and requests their images;
checkpoints are found at the same place there, or fetched from the Hub.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import torch

from publisher.checkpoints.downloads import brought_here
from publisher.checkpoints.snapshots import elsewhere
from publisher.engines import Begin, Job
from publisher.manifest.schema import Variant, VerificationSettings
from publisher.records.filenames import ADAPTER, CONFIG
from publisher.verification.answers import Answer
from publisher.verification.requests import Request
from publisher.verification.runners import Batch, Model, loaded


@dataclass(frozen=True, slots=True)
class Asked:
    """The batch at `place` of request file number `file`; `what` says for messages whose answers are wanted."""

    file: int
    place: int
    requests: Batch
    what: str


@dataclass(frozen=True, slots=True)
class Answering(Job[Asked, list[list[Answer]]]):
    """Answers per request and question, or why there are none.

    Attributes:
        model: what answers.
        variant: the manifest's entry.
        settings: its verification.
        over: how many GPUs the model is spread over.
        sent: the adapter's files, once the job goes to another machine.
    """

    model: Model
    variant: Variant
    settings: VerificationSettings
    over: int = 1
    sent: Mapping[str, bytes] | None = None

    @property
    def standing(self) -> int:
        """The weights of the model that is loaded."""
        return sum(file.size for file in (self.model.base or self.model.release).checkpoint.files)

    @property
    def gpus(self) -> float:
        """Those that the model is spread over."""
        return self.over

    def label(self, unit: Asked) -> str:
        """By its name."""
        return f"answering {unit.what}"

    def memory(self, unit: Asked) -> int:
        """Not known before a batch is asked."""
        del unit
        return 0

    def packed(self) -> Self:
        """With absolute paths, and the adapter itself."""
        adapter = self.model.adapter
        sent = {name: (adapter / name).read_bytes() for name in (CONFIG, ADAPTER)} if adapter else {}
        return replace(self, model=self.model.mapped(elsewhere), sent=sent)

    def packed_unit(self, unit: Asked) -> Asked:
        """With its images."""
        return replace(unit, requests=[request.self_contained() for request in unit.requests])

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[Asked, list[list[Answer]]]]:
        """With the model in memory."""
        with TemporaryDirectory() as folder:
            model = self.model if self.sent is None else _unpacked(self.model, self.sent, Path(folder))
            with loaded(model, self.variant, settings=self.settings, device=device, over=self.over) as runner:
                yield lambda asked: lambda _: runner(asked.requests)


def _unpacked(model: Model, sent: Mapping[str, bytes], folder: Path) -> Model:
    """The model as it can be loaded on this machine, the adapter in this folder."""
    for name, content in sent.items():
        (folder / name).write_bytes(content)
    return replace(model.mapped(brought_here), adapter=folder if sent else None)


def fitting(given: Sequence[Answer], request: Request) -> Sequence[Answer]:
    """One answer for each question, or that there are not."""
    wanted = len(request.questions)
    return given if len(given) == wanted else [f"{len(given)} answers to {wanted} questions"] * wanted


def batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """By place in the file alone, so that a request is always answered in the same company."""
    return [requests[start : start + size] for start in range(0, len(requests), size)]
