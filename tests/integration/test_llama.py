"""A LoRA that PEFT itself trained and merged, in a small Llama: the whole way, with and without tied embeddings."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from publisher.pipeline.run import Run, run
from publisher.records.extraction import Extraction
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from tests.manifests import ADAPTER, one_variant
from tests.models import small_llama

TARGETS = ["q_proj", "v_proj", "down_proj"]
STAGED = Path("dist/llama")


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest's paths are relative."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> Any:
    """A base in bf16, saved in ./base."""
    sizes = {"vocab_size": 128, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
    base = small_llama(sizes | {"tie_word_embeddings": request.param}, seed=11)
    base.save_pretrained("base")
    return base


def merged(base: Any) -> dict[str, torch.Tensor]:
    """Saves base + LoRA, merged by PEFT, in ./source; returns the updates by module."""
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(base, settings)
    layers = {
        name.removeprefix("base_model.model."): layer
        for name, layer in tuned.named_modules()
        if isinstance(layer, peft.tuners.lora.LoraLayer)
    }
    updates = {
        name: (2 * layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()).detach()
        for name, layer in layers.items()
    }
    tuned.merge_and_unload().save_pretrained("source")
    return updates


def published(**adapter: Any) -> Outcome:
    fields = {"adapter": {**ADAPTER, **adapter}, "expect": {"linears": 9, "layers": "0-2"}}
    card = {"title": "Llama", "summary": "A test."}
    text = one_variant("demo/llama", label="Llama in small", source="source", base="base", card=card, **fields)
    Path("llama.yaml").write_text(text)
    return run(Run(Path("llama.yaml"), Path("dist"), device="cpu", dry_run=True), silent)


def test_what_peft_merged_is_found_again_and_validates(model: Any) -> None:
    updates = merged(model)
    outcome = published()
    extraction = Extraction.read(STAGED / "extraction.json")
    found = load_file(STAGED / "adapter_model.safetensors")
    assert {module.name for module in extraction.modules} == updates.keys()
    for module in extraction.modules:
        assert module.rank == 4
        a, b = (found[f"base_model.model.{module.name}.lora_{side}.weight"] for side in "AB")
        update = updates[module.name]
        assert (b @ a - update).norm() < 2 * module.rounding_floor * update.norm()
    (variant,) = outcome.variants
    assert variant.validation is not None
    assert variant.validation.function is not None
    assert variant.validation.function.ratio < 0.05


def test_the_base_is_found_by_peft_itself_and_gives_the_sources_answers(model: Any) -> None:
    merged(model)
    published(dtype="bfloat16", layout="uniform")
    ids = torch.arange(2, 34).reshape(1, -1)
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(STAGED, dtype=torch.float32)
    source, base = (
        transformers.LlamaForCausalLM.from_pretrained(name, dtype=torch.float32) for name in ("source", "base")
    )
    with torch.no_grad():
        ours, theirs, untuned = (one(input_ids=ids).logits for one in (adapted, source, base))
    assert (ours - theirs).norm() < 0.05 * (untuned - theirs).norm()
