"""The function check of classes that are called with other inputs than token ids, or cannot be called at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from publisher.adapters.function_check import require_function
from publisher.adapters.loading import quiet
from publisher.adapters.model_inputs import InputError, inputs_for, outputs_of
from publisher.adapters.task_type_check import require_task_type
from publisher.errors import ValidationError
from publisher.manifest.schema import AdapterSettings
from publisher.manifest.task_types import task_type_of
from publisher.records.validation import FunctionCheck
from tests.inputs.classes import CASES
from tests.inputs.pairs import Pair, tune

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BART = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
VIDEO = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "num_frames": 4,
    "tubelet_size": 2,
}


def built(model_class: str, config: Mapping[str, Any]) -> Any:
    torch.manual_seed(3)
    found = getattr(transformers, model_class)
    with quiet():
        return found(found.config_class(**config)).eval()


def saved(name: str, folder: Path, *, pattern: str = "") -> Pair:
    case = CASES[name]
    pair = Pair(folder, case.model_class)
    model = built(case.model_class, case.config)
    with quiet():
        for place in (pair.base, pair.source):
            model.to(torch.bfloat16).save_pretrained(place)
    pair.change(lambda weights: tune(weights, pattern or case.pattern, dtype=torch.bfloat16))
    return pair


def check(pair: Pair, **settings: Any) -> FunctionCheck | str:
    """The function check alone, of an adapter with these settings."""
    extraction = pair.extracted(**settings)
    tuned, base = pair.snapshots()
    with quiet():
        return require_function(pair.variant, extraction, base=base, tuned=tuned, staged=pair.staged)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("T5", {"input_ids", "decoder_input_ids"}, ("logits",)),
        ("Whisper", {"input_features", "decoder_input_ids"}, ("logits",)),
        ("wav2vec 2", {"input_values"}, ("logits",)),
        ("ViT", {"pixel_values"}, ("logits",)),
        ("CLIP", {"input_ids", "pixel_values"}, ("logits_per_image", "logits_per_text")),
    ],
)
def test_a_class_is_called_with_what_its_forward_takes(
    name: str, inputs: set[str], outputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = saved(name, tmp_path)
    seen = check(pair, task_type=task_type_of(pair.model_class, CASES[name].config | {"is_encoder_decoder": True}))
    assert isinstance(seen, FunctionCheck)
    assert (set(seen.inputs), seen.outputs) == (inputs, outputs)
    assert seen.ratio < 0.1


@pytest.mark.parametrize(("name", "task_type"), [("Whisper", "SEQ_2_SEQ_LM"), ("CLIP", "FEATURE_EXTRACTION")])
def test_a_task_type_whose_wrapper_cannot_call_the_class_is_refused_before_the_arithmetic(
    name: str, task_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = saved(name, tmp_path)
    with pytest.raises(ValidationError, match=f"cannot be called as PEFT wraps it for task_type {task_type}") as caught:
        pair.extracted(task_type=task_type)
    assert "leave adapter.task_type out" in caught.value.next_step
    assert not (pair.folder / "work").exists()


@pytest.mark.parametrize(("name", "task_type"), [("BERT", "TOKEN_CLS"), ("ViT", "FEATURE_EXTRACTION")])
def test_another_task_type_than_that_of_a_new_manifest_is_taken_where_it_works(
    name: str, task_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = saved(name, tmp_path)
    require_task_type(pair.variant.model_copy(update={"adapter": with_task(pair, task_type)}), pair.base)


def with_task(pair: Pair, task_type: str) -> AdapterSettings:
    return pair.variant.adapter.model_copy(update={"task_type": task_type})


def test_what_the_text_alone_does_not_reach_is_told_and_not_called_an_adapter_that_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = saved("LLaVA", tmp_path, pattern=r"vision_tower\S*layers\.0\S*[qv]_proj\.weight")
    assert check(pair, task_type="FEATURE_EXTRACTION") == ("what differs has no part in the logits of input_ids alone")


def test_a_class_that_needs_what_is_not_made_here_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = Pair(tmp_path, "PatchTSTForPrediction")
    config = {"d_model": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32, "prediction_length": 8}
    model = built(pair.model_class, config)
    with quiet():
        for place in (pair.base, pair.source):
            model.to(torch.bfloat16).save_pretrained(place)
    pair.change(lambda weights: tune(weights, r"self_attn\.[qv]_proj\.weight", dtype=torch.bfloat16))
    extraction = pair.extracted(task_type=None)
    seen = pair.validated(extraction)
    reason = "the forward of PatchTSTForPrediction takes past_values, which are not made here"
    assert (seen.function, seen.function_skipped, seen.incomparable) == (None, reason, reason)


@pytest.mark.parametrize(
    ("model_class", "config", "shapes"),
    [
        (
            "BartForSequenceClassification",
            BART | {"eos_token_id": 2},
            {"input_ids": (2, 32), "decoder_input_ids": (2, 32)},
        ),
        ("LlamaForSequenceClassification", TEXT, {"input_ids": (1, 32)}),
        ("RobertaModel", TEXT | {"max_position_embeddings": 34, "pad_token_id": 1}, {"input_ids": (2, 17)}),
        ("VideoMAEForVideoClassification", VIDEO, {"pixel_values": (2, 4, 3, 16, 16)}),
        (
            "ResNetForImageClassification",
            {"hidden_sizes": [8, 8], "depths": [1, 1], "embedding_size": 8, "layer_type": "basic"},
            {"pixel_values": (2, 3, 64, 64)},
        ),
        (
            "Wav2Vec2BertForCTC",
            TEXT | {"feature_projection_input_dim": 20, "add_adapter": False},
            {"input_features": (2, 128, 20)},
        ),
    ],
)
def test_the_first_inputs_that_work_fit_the_class(
    model_class: str, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    model = built(model_class, config)
    inputs = next(found for found in inputs_for(model) if runs(model, found))
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == shapes


def runs(model: Any, inputs: Any) -> bool:
    try:
        return bool(outputs_of(model, inputs))
    except Exception:  # noqa: BLE001 - a class may raise anything over inputs that are not its own
        return False


def test_the_same_inputs_are_made_each_time() -> None:
    model = built("T5ForConditionalGeneration", CASES["T5"].config)
    one, other = (next(inputs_for(model)) for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_image_of_any_size_that_a_config_names_is_not_made() -> None:
    model = built("ViTForImageClassification", CASES["ViT"].config)
    model.config.image_size = 2**20
    with pytest.raises(InputError, match=r"pixel_values would have the shape .*, which is too large"):
        next(inputs_for(model))
