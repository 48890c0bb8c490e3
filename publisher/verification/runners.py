"""Loading one model, in one of two ways, and letting it answer batches of requests.

`decision` runs the source repository's own module on its own files, `logits` takes the next token after each text.
Base + adapter is loaded as its users load it: the base's weights and config.json, the release's other files (head,
tokenizer, processor, code), and the adapter by PEFT, whose complaints are errors here. Answers are logits in float32.
What one request cannot be answered for is its answer; running out of memory is an error.
"""

import gc
import importlib.util
import os
import sys
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

from publisher.adapters.loading import Adapter, class_named, load_adapter, quiet
from publisher.checkpoints.files import companions
from publisher.errors import VerificationError, listed
from publisher.manifest.schema import Variant, VerificationSettings
from publisher.records.checkpoint import Snapshot
from publisher.verification.answers import Answer
from publisher.verification.dispatch import spread
from publisher.verification.fp8_emulation import emulate
from publisher.verification.requests import Request

Batch = Sequence[Request]
Runner = Callable[[Batch], list[list[Answer]]]
_MODULE = "publisher_release_module"


@dataclass(frozen=True, slots=True)
class Model:
    """What answers.

    Attributes:
        label: what progress and messages call it.
        release: the source, whose folder has its head, code, tokenizer and processor beside the weights.
        base: the base in place of the source's weights; absent for the released model.
        adapter: the folder of the adapter on that base.
        fp8: the FP8 release that the base is turned into first.
    """

    label: str
    release: Snapshot
    base: Snapshot | None = None
    adapter: Path | None = None
    fp8: Snapshot | None = None

    def mapped(self, change: Callable[[Snapshot], Snapshot]) -> "Model":
        """The same with each of its checkpoints changed in this way."""
        base, fp8 = (part and change(part) for part in (self.base, self.fp8))
        return replace(self, release=change(self.release), base=base, fp8=fp8)


@contextmanager
def loaded(
    model: Model, variant: Variant, *, settings: VerificationSettings, device: torch.device, over: int = 1
) -> Iterator[Runner]:
    """The model's runner, for as long as the block runs; the memory of the model before it is freed first.

    Args:
        model: what answers.
        variant: the manifest's entry.
        settings: its verification.
        device: where the model goes, or where its inputs go if it is spread over several GPUs.
        over: how many.

    Raises:
        VerificationError: it cannot be loaded whole, or the source's module is not as it must be.
        FetchError: the FP8 checkpoint is not one of this base.
    """
    gc.collect()  # the model before this one, which was still in use when its block ended, and stands in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with quiet(), TemporaryDirectory() as work, torch.inference_mode():
        place = _Place(device, over)
        if settings.runner == "decision":
            runner = _decision(model, settings, place=place, work=Path(work))
        else:
            runner = _logits(model, variant, settings=settings, place=place)
        yield _one_by_one(runner)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model goes: a device, or several GPUs of which that one is the first."""

    device: torch.device
    over: int

    def put(self, network: Any) -> Any:
        return network.to(self.device) if self.over == 1 else spread(network, self.over)


def _one_by_one(answer: Runner) -> Runner:
    """Where a batch fails, each of its requests is asked alone, so that one failure is that of one request."""

    def answers(batch: Batch) -> list[list[Answer]]:
        try:
            return answer(batch)
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
    """The base with its FP8 values, where asked for, and the adapter on it."""
    if model.fp8 is not None:
        emulate(base, model.fp8)
    if model.adapter is None:
        return base
    adapted, complaints = load_adapter(base, Adapter(model.adapter))
    if complaints:
        raise VerificationError(f"PEFT complains about {model.adapter}:\n{listed(complaints)}\n")
    return adapted.eval()


# --- logits -------------------------------------------------------------------------------------------------


def _logits(model: Model, variant: Variant, *, settings: VerificationSettings, place: _Place) -> Runner:
    processor = transformers.AutoProcessor.from_pretrained(model.release.folder, local_files_only=True)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.padding_side = "right"  # what comes after a text has no part in its next token
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    weights = (model.base or model.release).folder
    plain = class_named(variant.model_class).from_pretrained(
        weights, dtype=getattr(torch, settings.dtype), local_files_only=True
    )
    network = place.put(_adapted(plain.eval(), model))

    def answers(batch: Batch) -> list[list[Answer]]:
        images = [image for request in batch for image in request.images()]
        if images and not hasattr(processor, "image_processor"):  # a tokenizer would pass over them
            raise ValueError("the release has no image processor")
        given: dict[str, Any] = {"images": images} if images else {}
        texts = [request.body["text"] for request in batch]
        inputs = processor(text=texts, return_tensors="pt", padding=True, **given).to(place.device)
        last = inputs["attention_mask"].sum(1) - 1
        found = network(**inputs).logits
        return [[_array(row[end])] for row, end in zip(found, last, strict=True)]

    return answers


def _array(logits: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    return logits.detach().float().reshape(-1).cpu().numpy()


# --- decision -----------------------------------------------------------------------------------------------


def _decision(model: Model, settings: VerificationSettings, *, place: _Place, work: Path) -> Runner:
    module = _module(model.release.folder / settings.module)
    folder = model.release.folder if model.base is None else _with_weights_of(model.base, model.release, work)
    first = place.device if place.over == 1 else torch.device("cpu")
    decider, processor = module.load_release_model(str(folder), device=first, dtype=getattr(torch, settings.dtype))
    name = _backbone_of(decider)
    backbone = _adapted(getattr(decider, name), model)
    setattr(decider, name, torch.nn.Identity())
    decider.to(place.device)  # the head, wherever the backbone goes
    setattr(decider, name, place.put(backbone))
    decider.eval()
    tokenizer = getattr(processor, "tokenizer", processor)
    padding = tokenizer.pad_token_id

    def answers(batch: Batch) -> list[list[Answer]]:
        records = [_encoded(module, processor, request) for request in batch]
        found = decider(module.collate_records(records, 0 if padding is None else padding, place.device))
        return [[_array(one) for one in answered] for answered in found]

    return answers


def _backbone_of(decider: torch.nn.Module) -> str:
    """What the module calls its language model: an adapter put elsewhere would change nothing, silently."""
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


def _module(file: Path) -> ModuleType:
    """The source's module; the manifest says that it may run."""
    spec = importlib.util.spec_from_file_location(_MODULE, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        raise VerificationError(f"the source has no {file.name}", next_step="correct module in the manifest")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses in it look themselves up
    try:
        with _no_bytecode():
            spec.loader.exec_module(module)
    except Exception as error:
        raise VerificationError(f"{file.name} of the source cannot be imported: {_reason(error)}") from error
    missing = [name for name in ("load_release_model", "encode_record", "collate_records") if not hasattr(module, name)]
    if missing:
        raise VerificationError(f"{file.name} of the source lacks {', '.join(missing)}", expected="a decision module")
    return module


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Nothing is cached beside the module: the source's folder stays as it is."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _with_weights_of(base: Snapshot, release: Snapshot, work: Path) -> Path:
    """A folder of links: the base's weights and config.json, and whatever else the release has.

    So the release's own loader builds base + head, and no two models are ever in memory.
    """
    for file in companions(release.folder, [file.name for file in release.checkpoint.files]):
        (work / file.name).symlink_to(os.path.realpath(file), target_is_directory=file.is_dir())
    for name in (file.name for file in base.checkpoint.files):
        (work / name).symlink_to(os.path.realpath(base.folder / name))
    return work
