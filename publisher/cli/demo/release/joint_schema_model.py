"""Decisions by a language model: a request's questions are answered in one pass, by logits over their options.

A request is a state (any JSON), images if there are any, and questions of three types: `noul` (true or false),
`choice` (of options, by id) and `score` (one of several levels). All of it is written into one text. The head compares
what the backbone makes of a whole question with what it makes of each option. It refuses a request that is longer
than it may be, or that has no questions.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3_5ForConditionalGeneration

CONFIG, WEIGHTS = "joint_head_config.json", "joint_head.safetensors"
_IMAGE = "<|image_pad|>"
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class EncodedQuestion:
    """Where a question and its options stand in the text; `option_ids` are in the order of the logits."""

    question_id: str
    kind: str
    option_ids: tuple[str, ...]
    whole: Span
    options: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A request as token ids; `vision` has the pixels of its images."""

    input_ids: list[int]
    image_tokens: list[int]
    questions: list[EncodedQuestion]
    vision: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Batch:
    """Records padded on the right, as the backbone takes them, and what is asked in each."""

    inputs: dict[str, Tensor]
    questions: list[list[EncodedQuestion]]


class Processor:
    """Tokenizer and image processor in one: a text with one image token per image, and the images."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer, self.image_processor = tokenizer, image_processor

    def __call__(self, *, text: str, images: Sequence[Any]) -> dict[str, Any]:
        """Return `input_ids` with as many image tokens as the images have, `pixel_values` and `image_grid_thw`."""
        vision = self.image_processor(images=list(images), return_tensors="pt")
        pieces = text.split(_IMAGE)
        counts = (vision["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
        long = "".join(piece + _IMAGE * count for piece, count in zip(pieces, [*counts, 0], strict=True))
        return {**_ids(self.tokenizer, long), "vision": dict(vision)}


class JointSchemaHead(nn.Module):
    """Compares a question with its options.

    Args:
        hidden_size: width of the backbone.
        head_size: in how many dimensions they are compared.
        scale: the deviation of the logits, about.
    """

    def __init__(self, hidden_size: int, head_size: int, scale: float) -> None:
        super().__init__()
        self.question = nn.Linear(hidden_size, head_size, bias=False)
        self.option = nn.Linear(hidden_size, head_size, bias=False)
        self.scale = scale / math.sqrt(head_size)

    def forward(self, question: Tensor, options: Tensor) -> Tensor:
        """Return logits, fp32 `(options,)`, of the means `(hidden,)` and `(options, hidden)`."""
        logits: Tensor = self.option(options) @ self.question(question) * self.scale
        return logits


class ClefModel(nn.Module):
    """The backbone, which may be a PEFT model, and the head."""

    def __init__(self, language_model: Any, head: JointSchemaHead) -> None:
        super().__init__()
        self.language_model, self.head = language_model, head

    def forward(self, batch: Batch) -> list[list[Tensor]]:
        """Return the logits of each question of each record.

        They are fp32, in the order of the options: noul (true, false); choice sorted by id; score from level 0.
        """
        peft = hasattr(self.language_model, "get_base_model")
        backbone = self.language_model.get_base_model() if peft else self.language_model
        states = backbone.model(**batch.inputs, use_cache=False).last_hidden_state.float()
        return [
            [self._logits(row, question) for question in asked]
            for row, asked in zip(states, batch.questions, strict=True)
        ]

    def _logits(self, states: Tensor, question: EncodedQuestion) -> Tensor:
        means = torch.stack([states[start:end].mean(0) for start, end in question.options])
        logits: Tensor = self.head(states[slice(*question.whole)].mean(0), means)
        return logits


def load_release_model(
    path: str | Path, device: Any = "cuda", dtype: torch.dtype = torch.bfloat16, **from_pretrained_kwargs: Any
) -> tuple[ClefModel, Processor]:
    """Load the release in a folder, ready to answer; the head computes in fp32.

    Args:
        path: folder of the release.
        device: where the model is put.
        dtype: dtype of the backbone.
        **from_pretrained_kwargs: for the backbone's `from_pretrained`.

    Returns:
        The model, and its tokenizer with its image processor.
    """
    backbone = Qwen3_5ForConditionalGeneration.from_pretrained(path, dtype=dtype, **from_pretrained_kwargs)
    head = JointSchemaHead(**json.loads(Path(path, CONFIG).read_text(encoding="utf-8")))
    head.load_state_dict(load_file(Path(path, WEIGHTS)))
    processor = Processor(AutoTokenizer.from_pretrained(path), AutoImageProcessor.from_pretrained(path))
    return ClefModel(backbone, head).to(device).eval(), processor


def encode_record(
    tokenizer: Any,
    record: Mapping[str, Any],
    max_length: int = 16384,
    max_state_tokens: int | None = None,
    processor: Any = None,
) -> EncodedRecord:
    """Write the record as one text: images, state, questions with their options.

    Args:
        tokenizer: tokenizer of the release.
        record: `state`, `questions`, and `images` (PIL).
        max_length: the most tokens that it may have.
        max_state_tokens: tokens of the state beyond this number are cut off.
        processor: the release's processor; needed where there are images.

    Returns:
        The token ids, where the questions and options are in them, and what the vision tower needs.

    Raises:
        ValueError: it is too long, has no questions, or has images and no processor came with it.
    """
    if not record.get("questions"):
        raise ValueError("the record has no questions")
    ids, vision = _seen(record.get("images") or (), processor)
    state = record["state"]
    text = state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
    ids += _ids(tokenizer, f"{text}\n")["input_ids"][:max_state_tokens]
    asked = [_asked(tokenizer, id_, one, ids=ids) for id_, one in record["questions"].items()]
    if len(ids) > max_length:
        raise ValueError(f"the record has {len(ids)} tokens, more than {max_length}")
    image = tokenizer.convert_tokens_to_ids(_IMAGE)
    return EncodedRecord(ids, [int(bool(vision) and id_ == image) for id_ in ids], asked, vision)


def _ids(tokenizer: Any, text: str) -> dict[str, Any]:
    return {"input_ids": list(tokenizer(text, add_special_tokens=False)["input_ids"])}


def _seen(images: Sequence[Any], processor: Any) -> tuple[list[int], Mapping[str, Tensor]]:
    if not images:
        return [], {}
    if processor is None:
        raise ValueError("the record has images; give a processor")
    found = processor(text=f"<|vision_start|>{_IMAGE}<|vision_end|>" * len(images), images=images)
    return found["input_ids"], found["vision"]


def _asked(tokenizer: Any, id_: str, question: Mapping[str, Any], *, ids: list[int]) -> EncodedQuestion:
    """Write the question at the end of `ids`."""
    start, spans = len(ids), []
    options = _options(question)
    ids += _ids(tokenizer, f"{question['type']} {id_}: {question.get('instructions', '')}\n")["input_ids"]
    for option, text in options.items():
        first = len(ids)
        ids += _ids(tokenizer, f" {option}: {text}\n")["input_ids"]
        spans.append((first, len(ids)))
    return EncodedQuestion(id_, question["type"], tuple(options), (start, len(ids)), tuple(spans))


def _options(question: Mapping[str, Any]) -> dict[str, str]:
    criteria: Any = question.get("criteria")
    if question["type"] == "noul":
        given = criteria if isinstance(criteria, Mapping) else {}
        return {"true": str(given.get("true", "yes")), "false": str(given.get("false", "no"))}
    if question["type"] == "choice":
        return {id_: str(criteria[id_]) for id_ in sorted(criteria or {})}
    return {str(level): str(text) for level, text in enumerate(criteria or ())}


def collate_records(records: Sequence[EncodedRecord], pad_token_id: int, device: Any) -> Batch:
    """Put records into one batch; what is padding is masked, so that no record sees the others.

    Args:
        records: encoded records.
        pad_token_id: what fills the shorter ones up.
        device: where the tensors are put.

    Returns:
        The batch, as long as the longest record.
    """
    longest = max(len(record.input_ids) for record in records)

    def padded(rows: list[list[int]], value: int) -> Tensor:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows], device=device)

    inputs = {
        "input_ids": padded([record.input_ids for record in records], pad_token_id),
        "attention_mask": padded([[1] * len(record.input_ids) for record in records], 0),
        "mm_token_type_ids": padded([record.image_tokens for record in records], 0),
    }
    seen = [record.vision for record in records if record.vision]
    inputs |= {name: torch.cat([one[name] for one in seen]).to(device) for name in (seen[0] if seen else ())}
    return Batch(inputs, [record.questions for record in records])


def systemone(
    model: ClefModel, processor: Processor, request: Mapping[str, Any], max_length: int = 16384
) -> dict[str, Any]:
    """Answer one request, with probabilities rounded to four decimals.

    Args:
        model: the backbone and its head.
        processor: tokenizer and image processor.
        request: the request, as the service takes it.
        max_length: the most tokens that it may have.

    Returns:
        The answer, as the service gives it.
    """
    record = encode_record(processor.tokenizer, request, max_length, processor=processor)
    device = next(model.head.parameters()).device
    with torch.inference_mode():
        (found,) = model(collate_records([record], processor.tokenizer.pad_token_id, device))
    asked = request["questions"]
    answers = {
        one.question_id: _answer(one, logits.softmax(-1).tolist(), criteria=asked[one.question_id].get("criteria"))
        for one, logits in zip(record.questions, found, strict=True)
    }
    usage = {"input_tokens": len(record.input_ids), "output_tokens": 0}
    return {"model": request.get("model", ""), "answers": answers, "usage": usage}


def _answer(question: EncodedQuestion, shares: list[float], *, criteria: Any) -> dict[str, Any]:
    rounded = {id_: round(share, 4) for id_, share in zip(question.option_ids, shares, strict=True)}
    if question.kind == "noul":
        return {"type": "noul", "noul": rounded["true"]}
    sure = {"confidence": round(max(shares), 4), "probabilities": rounded}
    if question.kind == "choice":
        return {"type": "choice", "choice": max(rounded, key=lambda id_: rounded[id_]), **sure}
    expected = round(sum(level * share for level, share in enumerate(shares)), 4)
    return {"type": "score", "score": expected, "legend": list(criteria), **sure}
