"""What a LoRA cannot hold: heads of classifiers, norms, tables; whole in the adapter, as PEFT saves and loads them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

import publisher
from publisher.adapters.loading import quiet
from publisher.errors import ExtractionError
from publisher.manifest.new import new_manifest
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.extraction import Extraction
from publisher.records.loaders import Loaders
from publisher.records.progress import silent
from tests.inputs.classes import CASES
from tests.inputs.pairs import RANK, Pair, Weights, tune
from tests.inputs.test_matrix import built, saved

MakePair = Callable[..., Pair]
QUERY = r"self_attn\.[qv]_proj"
STAGED = Path("dist/m")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reward_pair(folder: Path, *, labels: int) -> Pair:
    """A language model, and a reward model that was trained on it: another class, with a head of its own."""
    pair = Pair(folder, "LlamaForSequenceClassification")
    base = built(CASES["Llama"]).bfloat16()
    config = transformers.LlamaConfig(**CASES["Llama"].config, num_labels=labels)
    tuned = transformers.LlamaForSequenceClassification(config).bfloat16()
    tuned.model.load_state_dict(base.model.state_dict())
    with quiet():
        base.save_pretrained(pair.base)
        tuned.save_pretrained(pair.source)
    pair.change(lambda weights: tune(weights, QUERY))
    return pair


def published() -> Extraction:
    """What a new manifest publishes of ./source and ./base, audited green."""
    Path("m.yaml").write_text(new_manifest(base="base", tuned="source"))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    assert [check.name for check in publisher.audit(STAGED, device="cpu", deep=True).failed] == []
    return Extraction.read(STAGED / "extraction.json")


@pytest.mark.parametrize("labels", [1, 2, 5])
def test_a_reward_model_is_published_with_its_new_head(place: Path, labels: int) -> None:
    reward_pair(place, labels=labels)
    extraction = published()
    (head,) = extraction.summary.carried
    assert (head.module, head.tensors, head.norm, head.share) == ("score", ("score.weight",), None, None)
    assert extraction.summary.labels == (None if labels == 2 else labels)
    assert {module.rank for module in extraction.modules} == {RANK}
    card = (STAGED / "README.md").read_text()
    assert "`score` (the base has none such)" in card
    assert (f"    num_labels={labels},\n" in card) is (labels != 2)
    with quiet():
        base = transformers.LlamaForSequenceClassification.from_pretrained("base", num_labels=labels)
        adapted = PeftModel.from_pretrained(base, STAGED).eval()
        source = transformers.LlamaForSequenceClassification.from_pretrained("source").eval()
    ids = torch.arange(3, 19).reshape(1, -1)
    with torch.inference_mode():
        ours, theirs = (model(input_ids=ids).logits.float() for model in (adapted, source))
    assert torch.allclose(ours, theirs, atol=0.02)
    verdicts = {one.loader: one.loads for one in Loaders.read(STAGED / "loaders.json").verdicts}
    assert verdicts["PEFT"] == "yes"


def test_a_classifier_with_another_number_of_labels_than_the_base_is_published(place: Path) -> None:
    case = CASES["BERT classifier"]
    pair = Pair(place, case.model_class)
    base = built(case).bfloat16()
    torch.manual_seed(5)
    config = transformers.BertConfig(**case.config, num_labels=7)
    tuned = transformers.BertForSequenceClassification(config).bfloat16()
    tuned.bert.load_state_dict(base.bert.state_dict())
    with quiet():
        base.save_pretrained(pair.base)
        tuned.save_pretrained(pair.source)
    pair.change(lambda weights: tune(weights, case.pattern))
    extraction = published()
    assert extraction.summary.labels == 7
    assert [module.module for module in extraction.summary.carried] == ["classifier"]
    keys = load_file(STAGED / "adapter_model.safetensors").keys()
    assert {"base_model.model.classifier.weight", "base_model.model.classifier.bias"} <= keys


def test_the_head_of_a_classifier_is_in_the_adapter_even_where_it_did_not_change(place: Path) -> None:
    case = CASES["RoBERTa"]
    pair = Pair(place, case.model_class)
    with quiet():
        for side in (pair.base, pair.source):
            built(case).bfloat16().save_pretrained(side)
    pair.change(lambda weights: tune(weights, case.pattern))
    (head,) = published().summary.carried
    assert (head.module, head.norm) == ("classifier", 0)


# --- adapter.carry: auto ------------------------------------------------------------------------------------


def doubled(*names: str) -> Callable[[Weights], None]:
    def double(weights: Weights) -> None:
        for name in names:
            weights[name] = weights[name] * 2

    return double


def test_under_auto_what_no_lora_can_hold_is_stored_whole(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY)
    pair.change(doubled("model.norm.weight", "model.layers.0.input_layernorm.weight"))
    with pytest.raises(ExtractionError, match=r"write adapter\.carry: auto to store them too"):
        pair.extracted()
    extraction = pair.extracted(carry="auto")
    assert extraction.settings.carry == "auto"
    assert [module.module for module in extraction.summary.carried] == [
        "model.layers.0.input_layernorm",
        "model.norm",
    ]
    assert len(extraction.modules) == 4
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


def test_under_auto_a_tensor_of_the_source_alone_is_stored_too(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY, attention_bias=True)
    names = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in (0, 1)]

    def lose(weights: Weights) -> None:
        for name in names:
            weights.pop(name)

    pair.change(lose, side="base")
    extraction = pair.extracted(carry="auto")
    assert [module.module for module in extraction.summary.carried] == [
        f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)
    ]


def test_under_auto_a_parameter_that_peft_cannot_store_is_still_named(make_pair: MakePair) -> None:
    pair = make_pair("Mamba", "in_proj|x_proj")
    pair.change(doubled("backbone.layers.0.mixer.A_log"))
    with pytest.raises(ExtractionError, match=r"backbone\.layers\.0\.mixer\.A_log"):
        pair.extracted(carry="auto")


def test_a_pair_in_which_all_that_differs_is_carried_is_told_so(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "no such name")
    pair.change(doubled("model.norm.weight"))
    with pytest.raises(ExtractionError) as raised:
        pair.extracted(carry=["*norm*"])
    assert str(raised.value).startswith(
        "all that differs is stored whole, in 1 module, so there is nothing to publish."
    )
    assert "adapter.ignore" not in str(raised.value)


def test_a_carry_that_is_no_list_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r"'all' is no list of tensors; write auto, or a list of names and patterns"):
        Pair(Path(), "LlamaForCausalLM", {"carry": "all"}).variant.adapter.carry  # noqa: B018 - read to be checked


def any_carry(value: Any) -> Any:
    return Pair(Path(), "LlamaForCausalLM", {"carry": value}).variant.adapter.carry


def test_a_carry_is_auto_or_a_list() -> None:
    assert any_carry("auto") == "auto"
    assert any_carry(["*.norm.*"]) == ("*.norm.*",)


# --- rows of a table ----------------------------------------------------------------------------------------


def moved(*rows: int, name: str = "model.embed_tokens.weight") -> Callable[[Weights], None]:
    def move(weights: Weights) -> None:
        weights[name][list(rows)] += 0.5

    return move


@pytest.mark.parametrize("tied", [False, True])
def test_a_few_rows_of_the_embedding_are_stored_as_token_indices(place: Path, make_pair: MakePair, tied: bool) -> None:
    pair = make_pair("Llama", QUERY, tie_word_embeddings=tied)
    assert pair.folder == place
    pair.change(moved(3, 17, 60))
    manifest = new_manifest(base="base", tuned="source")
    Path("m.yaml").write_text(manifest.replace("layout: pattern", "carry: auto\n      layout: pattern"))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    extraction = Extraction.read(STAGED / "extraction.json")
    (table,) = extraction.summary.token_rows
    assert (table.module, table.rows) == ("model.embed_tokens", (3, 17, 60))
    assert table.tied == (("lm_head",) if tied else ())
    assert extraction.summary.carried == ()
    weights = load_file(STAGED / "adapter_model.safetensors")
    stored = weights["base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"]
    assert torch.equal(stored, load_file("source/model.safetensors")["model.embed_tokens.weight"][[3, 17, 60]])
    assert "as `trainable_token_indices`: 3 of them" in (STAGED / "README.md").read_text()
    assert [check.name for check in publisher.audit(STAGED, device="cpu", deep=True).failed] == []
    merge(Request(Path("m.yaml"), Path("dist"), None, Path("merged")), silent)
    merged, source = (load_file(f"{folder}/model.safetensors") for folder in ("merged", "source"))
    assert torch.equal(merged["model.embed_tokens.weight"], source["model.embed_tokens.weight"])


def of_low_rank(name: str, *, dtype: torch.dtype = torch.bfloat16) -> Callable[[Weights], None]:
    """A change of rank 2 in this weight, all but its first extent taken together."""

    def change(weights: Weights) -> None:
        weight = weights[name].float()
        update = torch.randn(weight.shape[0], RANK) @ torch.randn(RANK, weight[0].numel())
        weights[name] = (weight + 0.02 * update.reshape(weight.shape)).to(dtype)

    return change


def test_a_table_whose_change_has_a_low_rank_gets_factors(place: Path, make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY)
    assert pair.folder == place
    pair.change(of_low_rank("model.embed_tokens.weight"))
    manifest = new_manifest(base="base", tuned="source")
    Path("m.yaml").write_text(manifest.replace("layout: pattern", "carry: auto\n      layout: pattern"))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    extraction = Extraction.read(STAGED / "extraction.json")
    (table,) = extraction.summary.factored
    assert (table.module, table.kind, table.rank, table.parameters) == ("model.embed_tokens", "embedding", RANK, 192)
    assert (extraction.summary.carried, extraction.summary.token_rows) == ((), ())
    weights = load_file(STAGED / "adapter_model.safetensors")
    assert weights["base_model.model.model.embed_tokens.lora_embedding_A"].shape == (RANK, 64)
    assert weights["base_model.model.model.embed_tokens.lora_embedding_B"].shape == (32, RANK)
    card = (STAGED / "README.md").read_text()
    assert "Factors for the table `model.embed_tokens` are in the" in card
    assert "4 linears and 1 table, all 2 layers" in card
    assert [check.name for check in publisher.audit(STAGED, device="cpu", deep=True).failed] == []
    model = transformers.AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(model, STAGED).merge_and_unload()
    source = transformers.AutoModelForCausalLM.from_pretrained("source", dtype=torch.float32)
    ids = torch.arange(20)[None]
    torch.testing.assert_close(adapted(ids).logits, source(ids).logits, rtol=0.02, atol=0.02)
    merge(Request(Path("m.yaml"), Path("dist"), None, Path("merged")), silent)
    restored, released = (
        load_file(f"{at}/model.safetensors")["model.embed_tokens.weight"] for at in ("merged", "source")
    )
    assert float((restored == released).double().mean()) == pytest.approx(extraction.modules[0].exact_share, abs=0.01)


@pytest.mark.parametrize(
    ("name", "end", "kernel"),
    [("AST", "projection.weight", (8, 8)), ("ViT", "projection.weight", (8, 8))],
)
def test_a_convolution_whose_change_has_a_low_rank_gets_factors(
    place: Path, name: str, end: str, kernel: tuple[int, ...]
) -> None:
    pair = saved(CASES[name], place)
    (stored,) = (one for one in load_file(pair.source / "model.safetensors") if one.endswith(end))
    pair.change(of_low_rank(stored, dtype=CASES[name].tuned))
    extraction = pair.extracted(carry="auto", task_type=None)
    (found,) = (module for module in extraction.modules if module.kind == "convolution")
    assert (found.rank, found.kernel) == (RANK, kernel)
    weights = load_file(pair.staged / "adapter_model.safetensors")
    assert [weights[key].shape for key in found.keys] == [torch.Size(shape) for shape in found.factor_shapes]
    assert weights[found.keys[0]].shape[2:] == kernel
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


def test_a_convolution_that_the_class_cannot_run_with_as_peft_wraps_it_is_stored_whole(place: Path) -> None:
    """Whisper reads the stride of its convolutions, which PEFT's wrapper does not have."""
    pair = saved(CASES["Whisper"], place)
    pair.change(of_low_rank("model.encoder.conv1.weight", dtype=CASES["Whisper"].tuned))
    extraction = pair.extracted(carry="auto", task_type=None)
    assert [module.module for module in extraction.summary.carried] == ["model.encoder.conv1"]
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


def test_a_convolution_of_which_more_than_a_low_rank_changed_is_stored_whole(place: Path) -> None:
    pair = saved(CASES["ViT"], place)
    (stored,) = (one for one in load_file(pair.source / "model.safetensors") if one.endswith("projection.weight"))
    pair.change(lambda weights: weights[stored].add_(0.1 * torch.randn(weights[stored].shape)))
    extraction = pair.extracted(carry="auto", task_type=None)
    assert extraction.summary.factored == ()
    assert [module.module.rpartition(".")[2] for module in extraction.summary.carried] == ["projection"]


def test_a_table_of_low_rank_that_the_head_shares_is_stored_whole(make_pair: MakePair) -> None:
    """PEFT's merge_and_unload adds the update of a shared weight twice."""
    pair = make_pair("Llama", QUERY, tie_word_embeddings=True)
    pair.change(of_low_rank("model.embed_tokens.weight"))
    extraction = pair.extracted(carry="auto")
    assert extraction.summary.factored == ()
    assert [module.module for module in extraction.summary.carried] == ["model.embed_tokens"]


def test_a_table_of_which_most_rows_differ_is_stored_whole(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY)
    pair.change(lambda weights: weights["model.embed_tokens.weight"][:40].add_(0.5 * torch.randn(40, 32)))
    extraction = pair.extracted(carry="auto")
    assert extraction.summary.token_rows == ()
    assert [module.module for module in extraction.summary.carried] == ["model.embed_tokens"]


def test_a_new_manifest_asks_for_auto_where_the_source_has_more_than_the_base(place: Path) -> None:
    case = CASES["BERT classifier"]
    pair = Pair(place, case.model_class)
    config = transformers.BertConfig(**case.config)
    tuned = transformers.BertForSequenceClassification(config).bfloat16()
    base = transformers.BertForMaskedLM(config).bfloat16()
    base.bert.load_state_dict(tuned.bert.state_dict(), strict=False)
    with quiet():
        base.save_pretrained(pair.base)
        tuned.save_pretrained(pair.source)
    pair.change(lambda weights: tune(weights, case.pattern))
    with pytest.raises(ExtractionError, match=r"adapter\.carry: auto stores what the source alone has"):
        pair.extracted(task_type="SEQ_CLS")
    assert "      carry: auto # the source has tensors that the base lacks" in new_manifest(base="base", tuned="source")
    assert [module.module for module in published().summary.carried] == ["bert.pooler.dense", "classifier"]


def test_a_head_of_its_own_is_not_stored_where_the_base_ties_it_to_the_table(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY, tie_word_embeddings=True)
    pair.change(lambda weights: weights.update({"lm_head.weight": 2 * weights["model.embed_tokens.weight"]}))
    with pytest.raises(
        ExtractionError, match=r"the base's class shares one weight where the source has two:\n  lm_head"
    ):
        pair.extracted(carry=["lm_head.weight"])
