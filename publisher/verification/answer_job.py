"""The unit of work of a verification: one model answers one batch of requests, on this machine or on another.

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
from publisher.checkpoints.snapshots import absolute
from publisher.engines import Begin, Job
from publisher.manifest.schema import VerificationSettings
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG
from publisher.verification.answer_log import Answer
from publisher.verification.models import Model, loaded
from publisher.verification.request_files import Request


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """One batch of a request file.

    Attributes:
        file: which of the request files, counted from 0 in the manifest's order.
        number: which batch of that file, counted from 0.
        requests: the requests of the batch.
        label: what messages call it: the test set, and the model that is asked.
    """

    file: int
    number: int
    requests: Sequence[Request]
    label: str


@dataclass(frozen=True, slots=True)
class AnswerJob(Job[RequestBatch, list[list[Answer]]]):
    """Lets one model answer batches; a result has, for each request and question, logits or why there are none.

    Attributes:
        model: the model that answers.
        settings: the manifest's verification, of which the runner, its module and the dtype are read.
        model_gpus: number of GPUs that the model is spread over.
        adapter_files: content of the adapter's files by name, once the job goes to another machine.
    """

    model: Model
    settings: VerificationSettings
    model_gpus: int = 1
    adapter_files: Mapping[str, bytes] | None = None

    @property
    def standing(self) -> int:
        """Bytes of the weights of the model that is loaded."""
        return sum(file.size for file in (self.model.base or self.model.tuned).checkpoint.files)

    @property
    def gpus(self) -> float:
        """Number of GPUs that the model is spread over."""
        return self.model_gpus

    def label(self, unit: RequestBatch) -> str:
        """Return what progress says while this batch is answered."""
        return f"answering {unit.label}"

    def memory(self, unit: RequestBatch) -> int:
        """Return 0: what a batch takes is not known before it is asked."""
        del unit
        return 0

    def packed(self) -> Self:
        """Return the job with absolute paths and the adapter's content, for another machine."""
        adapter = self.model.adapter
        files = {name: (adapter / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER)} if adapter else {}
        return replace(self, model=self.model.mapped(absolute), adapter_files=files)

    def packed_unit(self, unit: RequestBatch) -> RequestBatch:
        """Return the batch with the content of its images, for another machine."""
        return replace(unit, requests=[request.self_contained() for request in unit.requests])

    @contextmanager
    def opened(self, device: torch.device) -> Iterator[Begin[RequestBatch, list[list[Answer]]]]:
        """Hold the model in memory for as long as the block runs."""
        with TemporaryDirectory() as folder:
            model = self.model
            if self.adapter_files is not None:
                model = _unpacked(model, self.adapter_files, Path(folder))
            with loaded(model, self.settings, device=device, model_gpus=self.model_gpus) as ask:
                yield lambda batch: lambda _: ask(batch.requests)


def _unpacked(model: Model, adapter_files: Mapping[str, bytes], folder: Path) -> Model:
    """Return the model as it can be loaded on this machine, with its adapter in this folder."""
    for name, content in adapter_files.items():
        (folder / name).write_bytes(content)
    return replace(model.mapped(brought_here), adapter=folder if adapter_files else None)


def one_for_each_question(answers: Sequence[Answer], request: Request) -> Sequence[Answer]:
    """Return the answers where there is one for each question of the request, else that reason for each question."""
    wanted = len(request.questions)
    return answers if len(answers) == wanted else [f"{len(answers)} answers to {wanted} questions"] * wanted


def batches(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Split a file's requests into batches of this size.

    Where a request stands in the file alone decides its batch, so that it is always answered together with the same
    others: what a model computes for one request can depend in its last digits on what is padded beside it.
    """
    return [requests[start : start + size] for start in range(0, len(requests), size)]
