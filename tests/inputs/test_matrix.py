"""Classes of every kind, each with a planted update: an adapter that leads to the source's logits, by its own means."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers.pytorch_utils import Conv1D

from publisher.adapters.loading import quiet
from publisher.adapters.model_inputs import inputs_for
from publisher.manifest.task_types import task_type_of
from tests.inputs.classes import CASES, Case
from tests.inputs.pairs import RANK, Pair, tune

USUAL = ("Qwen3", "T5", "Whisper", "wav2vec 2", "ViT", "CLIP", "Gemma 3 with pictures", "Mixtral", "BERT classifier")


def built(case: Case) -> Any:
    torch.manual_seed(11)
    model_class = getattr(transformers, case.model_class)
    return model_class(model_class.config_class(**case.config)).eval()


def saved(case: Case, folder: Path) -> Pair:
    """The pair as save_pretrained writes it, each side in its dtype."""
    pair = Pair(folder, case.model_class)
    model = built(case)
    with quiet():
        model.to(case.base).save_pretrained(pair.base)
        model.to(case.tuned).save_pretrained(pair.source)
    pair.change(lambda weights: tune(weights, case.pattern, dtype=case.tuned))
    return pair


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.long) for name in CASES]
)
def test_the_update_comes_out_and_leads_to_the_sources_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.chdir(tmp_path)
    pair = saved(case, tmp_path)
    config = built(case).config.to_dict()
    extraction = pair.extracted(task_type=task_type_of(case.model_class, config), **case.settings)
    assert len(extraction.modules) == case.modules
    assert {module.rank for module in extraction.modules} <= {RANK}
    assert len(extraction.experts) == case.experts
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


@pytest.mark.parametrize("name", list(CASES))
def test_the_task_type_of_a_new_manifest_works_in_peft(name: str) -> None:
    model = built(CASES[name])
    inputs = next(found for found in inputs_for(model) if computes(model, found))
    linear = (one for one, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D))
    leaf = next(one for one in linear if "head" not in one)
    task = task_type_of(CASES[name].model_class, model.config.to_dict())
    settings = {"fan_in_fan_out": True} if isinstance(model.get_submodule(leaf), Conv1D) else {}
    lora = peft.LoraConfig(r=2, target_modules=[leaf.rpartition(".")[2]], task_type=task, **settings)
    adapted = peft.get_peft_model(model, lora)
    assert computes(adapted, inputs)


def computes(model: Any, inputs: Any) -> bool:
    try:
        with torch.inference_mode():
            return bool(model(**inputs)[0].isfinite().all())
    except (TypeError, ValueError, AttributeError):
        return False
