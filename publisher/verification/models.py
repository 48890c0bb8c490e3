"""Loading one model, by one of two runners, and letting it answer batches of requests.

The runner `decision` runs the source repository's own module on its own files, `logits` takes the next token after each
text. Base + adapter is loaded as its users load it: the base's weights and config.json, the tuned checkpoint's other
files (head, tokenizer, processor, code), and the adapter by PEFT, whose complaints are errors here. Answers are logits
in float32. Where a request cannot be answered, the reason is its answer; running out of memory is an error.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers

from publisher.adapters.loading import AdapterLocation, class_named, load_adapter, quiet
from publisher.adapters.quantised_model import set_quantised
from publisher.checkpoints.files import companions
from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.wrappers import key_mapping
from publisher.errors import VerificationError, listed
from publisher.manifest.schema import VerificationSettings
from publisher.records.checkpoint import Snapshot
from publisher.verification.answer_log import Answer
from publisher.verification.fp8_emulation import emulate
from publisher.verification.multi_gpu import spread_over_gpus
from publisher.verification.release_code import one_error, release_module
from publisher.verification.request_files import Request

Ask = Callable[[Sequence[Request]], list[list[Answer]]]
"""Asks a model one batch: for each request, the answers to its questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that answers: the released one, or base + adapter.

    Attributes:
        label: what progress and messages call it.
        model_class: name of its class in transformers; only the runner `logits` goes by it.
        base: the checkpoint whose weights are loaded in place of the tuned ones; None for the released model.
        tuned: the released checkpoint, whose folder has head, code, tokenizer and processor beside the weights.
        adapter: folder of the adapter that is put on the base; None for the released model.
        fp8: the FP8 release that the base is turned into first, where the adapter is tried on that.
    """

    label: str
    model_class: str
    base: Snapshot | None = None
    tuned: Snapshot
    adapter: Path | None = None
    fp8: Snapshot | None = None

    def mapped(self, change: Callable[[Snapshot], Snapshot]) -> "Model":
        """Return the model with each of its checkpoints changed by this function."""
        base, fp8 = (part and change(part) for part in (self.base, self.fp8))
        return replace(self, base=base, tuned=change(self.tuned), fp8=fp8)


@contextmanager
def loaded(model: Model, settings: VerificationSettings, *, device: torch.device, model_gpus: int = 1) -> Iterator[Ask]:
    """Load a model for as long as the block runs; the memory of the model before it is freed first.

    Args:
        model: the model that answers.
        settings: the manifest's verification, of which the runner, its module and the dtype are read.
        device: where the model goes, or where its inputs go if it is spread over several GPUs.
        model_gpus: number of GPUs that it is spread over.

    Yields:
        The function that asks the model one batch. A batch that fails is asked again request by request, so that one
        request's failure is no other's.

    Raises:
        VerificationError: it cannot be loaded whole, or the source's module is not as it must be.
        FetchError: the FP8 checkpoint is not one of this base.
    """
    gc.collect()  # the model before this one, which was still in use when its block ended, and stands in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with quiet(), TemporaryDirectory() as work, torch.inference_mode():
        devices = _Devices(device, model_gpus)
        if settings.runner == "decision":
            ask = _decision(model, settings, devices=devices, work=Path(work))
        else:
            ask = _logits(model, settings, devices=devices)
        yield _one_by_one(ask)


@dataclass(frozen=True, slots=True)
class _Devices:
    """Where a model goes: on the device `first` alone, or on `model_gpus` GPUs of which that one is the first."""

    first: torch.device
    model_gpus: int

    def put(self, network: Any) -> Any:
        return network.to(self.first) if self.model_gpus == 1 else spread_over_gpus(network, self.model_gpus)


def _one_by_one(ask: Ask) -> Ask:
    """Return a function that asks the same and, where a batch fails, each of its requests alone."""

    def answers(batch: Sequence[Request]) -> list[list[Answer]]:
        try:
            return ask(batch)
        except torch.OutOfMemoryError as error:
            raise _no_memory(error) from None
        except Exception as error:  # noqa: BLE001 - whatever the model's code raises is a failure to answer
            if len(batch) > 1:
                return [answers([one])[0] for one in batch]
            return [[_reason(error) for _ in batch[0].questions]]

    return answers


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}".rstrip(": ")


def _no_memory(error: torch.OutOfMemoryError) -> VerificationError:
    return VerificationError(
        f"the device's memory does not hold a batch ({str(error).partition('. ')[0]})",
        next_step="write a smaller batch in the manifest's verification; the same command goes on from there",
    )


def _adapted(base: Any, model: Model) -> Any:
    """Return the base with its FP8 values, where they are asked for, and the adapter on it."""
    if model.base is not None:
        set_quantised(base, model.base.quantised)
    if model.fp8 is not None:
        emulate(base, model.fp8)
    if model.adapter is None:
        return base
    adapted, complaints = load_adapter(base, AdapterLocation(model.adapter))
    if complaints:
        raise VerificationError(f"PEFT complains about {model.adapter}:\n{listed(complaints)}\n")
    return adapted.eval()


# --- logits -------------------------------------------------------------------------------------------------


def _logits(model: Model, settings: VerificationSettings, *, devices: _Devices) -> Ask:
    """Load the model by its class in transformers, and answer with the logits of the token after each text."""
    with one_error("AutoProcessor does not load what the source brings"):
        processor = transformers.AutoProcessor.from_pretrained(model.tuned.folder, local_files_only=True)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side = "right"  # what comes after a text has no part in its next token
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    weights = (model.base or model.tuned).folder
    plain = class_named(model.model_class).from_pretrained(
        weights,
        dtype=getattr(torch, settings.dtype),
        local_files_only=True,
        key_mapping=key_mapping(read_headers(weights)),
    )
    network = devices.put(_adapted(plain.eval(), model))

    def answers(batch: Sequence[Request]) -> list[list[Answer]]:
        images = [image for request in batch for image in request.images()]
        if images and not hasattr(processor, "image_processor"):  # a tokenizer would pass over them
            raise ValueError("the release has no image processor")
        given: dict[str, Any] = {"images": images} if images else {}
        texts = [request.body["text"] for request in batch]
        inputs = processor(text=texts, return_tensors="pt", padding=True, **given).to(devices.first)
        last = inputs["attention_mask"].sum(1) - 1
        found = network(**inputs).logits
        return [[_array(row[end])] for row, end in zip(found, last, strict=True)]

    return answers


def _array(logits: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return logits.detach().float().reshape(-1).cpu().numpy()


# --- decision -----------------------------------------------------------------------------------------------


def _decision(model: Model, settings: VerificationSettings, *, devices: _Devices, work: Path) -> Ask:
    """Load the model by the source's own module, and answer with the logits of the options of each question."""
    module = release_module(model.tuned.folder / settings.module)
    folder = model.tuned.folder
    if model.base is not None:
        folder = _with_weights_of(model.base, tuned=model.tuned, work=work)
    load_on = devices.first if devices.model_gpus == 1 else torch.device("cpu")
    dtype = getattr(torch, settings.dtype)
    with one_error(f"{settings.module} of the source does not load {model.label}"):
        decider, processor = module.load_release_model(str(folder), device=load_on, dtype=dtype)
    name = _backbone_of(decider)
    backbone = _adapted(getattr(decider, name), model)
    setattr(decider, name, torch.nn.Identity())
    decider.to(devices.first)  # the head, wherever the backbone goes
    setattr(decider, name, devices.put(backbone))
    decider.eval()
    tokenizer = getattr(processor, "tokenizer", processor)
    padding = tokenizer.pad_token_id

    def answers(batch: Sequence[Request]) -> list[list[Answer]]:
        records = [_encoded(module, processor, request) for request in batch]
        found = decider(module.collate_records(records, 0 if padding is None else padding, devices.first))
        return [[_array(one) for one in answered] for answered in found]

    return answers


def _backbone_of(decider: torch.nn.Module) -> str:
    """Return what the module calls its language model: an adapter put elsewhere would change nothing, silently."""
    found = [name for name, child in decider.named_children() if isinstance(child, transformers.PreTrainedModel)]
    if len(found) != 1:
        raise VerificationError(f"the source's module holds {len(found)} models of transformers", expected="one")
    return found[0]


def _encoded(module: ModuleType, processor: Any, request: Request) -> Any:
    tokenizer = getattr(processor, "tokenizer", processor)
    images = request.images()
    if not images:
        return module.encode_record(tokenizer, dict(request.body))
    return module.encode_record(tokenizer, {**request.body, "images": images}, processor=processor)


def _with_weights_of(base: Snapshot, *, tuned: Snapshot, work: Path) -> Path:
    """Fill the folder `work` with links to the base's weights and config.json, and to all else that the tuned one has.

    So the source's own loader builds base + head, and no two models are ever in memory.
    """
    for file in companions(tuned.folder, [file.name for file in tuned.checkpoint.files]):
        (work / file.name).symlink_to(os.path.realpath(file), target_is_directory=file.is_dir())
    for name in (file.name for file in base.checkpoint.files):
        (work / name).symlink_to(os.path.realpath(base.folder / name))
    return work
