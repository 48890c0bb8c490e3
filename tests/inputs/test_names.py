"""Files whose tensors have other names, or other parts, than the model class: the adapter has the class's names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from publisher.adapters.loading import quiet
from publisher.errors import ExtractionError
from publisher.manifest.new import new_manifest
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.inputs.pairs import RANK, Pair, Weights, tune

MakePair = Callable[..., Pair]
QUERY = r"self_attn\.[qv]_proj"
GEMMA3 = {
    "text_config": {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 63,
    "boi_token_index": 61,
    "eoi_token_index": 62,
}
BERT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def saved_pair(folder: Path, monkeypatch: pytest.MonkeyPatch, model: Any, *, pattern: str) -> Pair:
    """A pair as save_pretrained writes it, whose fine-tune has an update in the matrices that match by their files."""
    monkeypatch.chdir(folder)
    pair = Pair(folder, type(model).__name__)
    with quiet():
        for side in (pair.base, pair.source):
            model.save_pretrained(side)
    pair.change(lambda weights: tune(weights, pattern))
    return pair


def renamed(change: Callable[[str], str]) -> Callable[[Weights], None]:
    def rename(weights: Weights) -> None:
        for name in list(weights):
            weights[change(name)] = weights.pop(name)

    return rename


def extracted_modules(pair: Pair) -> list[str]:
    """The modules of the adapter, each of the planted rank, which PEFT loads and which leads to the source's logits."""
    extraction = pair.extracted()
    seen = pair.validated(extraction)
    assert {module.rank for module in extraction.modules} == {RANK}
    assert seen.function is not None
    assert seen.function.ratio < 0.1
    assert extraction.summary.left_out == ()
    return [module.name for module in extraction.modules]


def test_gemma3s_files_have_other_names_than_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(**GEMMA3)).bfloat16()
    pair = saved_pair(tmp_path, monkeypatch, model, pattern=QUERY)
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in load_file(pair.base / "model.safetensors")
    extraction = pair.extracted(task_type="FEATURE_EXTRACTION")
    assert extraction.modules[0].name == "model.language_model.layers.0.self_attn.q_proj"
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.1


def test_gpt2s_files_on_the_hub_have_no_prefix_and_hold_masks(make_pair: MakePair) -> None:
    pair = make_pair("GPT2", "c_attn")
    mask = torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64)
    pair.change(renamed(lambda name: name.removeprefix("transformer.")), side="base")
    pair.change(lambda weights: weights.update({f"h.{n}.attn.bias": mask.clone() for n in (0, 1)}), side="base")
    assert "model_class: GPT2LMHeadModel" in new_manifest(base="base", tuned="source")
    assert extracted_modules(pair) == [f"transformer.h.{n}.attn.c_attn" for n in (0, 1)]


def test_what_a_class_computes_by_itself_is_no_difference(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY)
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in (0, 1)}
    pair.change(lambda weights: weights.update(frequencies))
    assert len(extracted_modules(pair)) == 4


@pytest.mark.parametrize("side", ["source", "base"])
def test_a_tied_head_that_one_side_writes_out_is_no_difference(make_pair: MakePair, side: str) -> None:
    pair = make_pair("Llama", QUERY, tie_word_embeddings=True)
    pair.change(
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}), side=side
    )
    assert len(extracted_modules(pair)) == 4


def test_a_head_of_its_own_where_the_class_ties_it_is_named(make_pair: MakePair) -> None:
    pair = make_pair("Llama", QUERY, tie_word_embeddings=True)
    pair.change(lambda weights: weights.update({"lm_head.weight": 2 * weights["model.embed_tokens.weight"]}))
    with pytest.raises(ExtractionError, match=r"lm_head\.weight is in the source alone"):
        pair.extracted()


@pytest.mark.parametrize(
    "wrapped",
    [lambda name: f"module.{name}", lambda name: f"_orig_mod.{name}", lambda name: f"module._orig_mod.{name}"],
    ids=["DistributedDataParallel", "torch.compile", "both"],
)
def test_prefixes_of_wrappers_are_read_through(make_pair: MakePair, wrapped: Callable[[str], str]) -> None:
    pair = make_pair("Llama", QUERY)
    pair.change(renamed(wrapped))
    pair.settings = {}
    extraction = pair.extracted()
    assert extraction.modules[0].name == "model.layers.0.self_attn.q_proj"
    assert {module.rank for module in extraction.modules} == {RANK}


def test_gamma_and_beta_are_weight_and_bias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).bfloat16()
    pair = saved_pair(tmp_path, monkeypatch, model, pattern=r"attention\.self\.(query|value)")
    spelt = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def earlier(name: str) -> str:
        return next((name.replace(new, old) for new, old in spelt.items() if new in name), name)

    pair.change(renamed(earlier), side="base")
    extraction = pair.extracted(task_type="FEATURE_EXTRACTION")
    assert extraction.modules[0].name == "bert.encoder.layer.0.attention.self.query"
    assert extraction.summary.tensors_base_only == ()


def test_weight_norm_in_its_earlier_spelling_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 8),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    pair = saved_pair(tmp_path, monkeypatch, transformers.Wav2Vec2ForCTC(config).bfloat16(), pattern="[qv]_proj")
    ends = {".parametrizations.weight.original0": ".weight_g", ".parametrizations.weight.original1": ".weight_v"}

    def earlier(name: str) -> str:
        return next((name.replace(new, old) for new, old in ends.items() if name.endswith(new)), name)

    before = load_file(pair.base / "model.safetensors")
    pair.change(renamed(earlier), side="base")
    assert load_file(pair.base / "model.safetensors").keys() != before.keys()
    extraction = pair.extracted(task_type="FEATURE_EXTRACTION")
    assert extraction.modules[0].name == "wav2vec2.encoder.layers.0.attention.q_proj"


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """They are the same but for a rounding of some elements."""
    return bool((ours.float() - theirs.float()).norm() < 0.005 * theirs.float().norm())


def test_a_merge_writes_the_names_of_the_bases_files(make_pair: MakePair) -> None:
    pair = make_pair("GPT2", "c_attn")
    pair.change(renamed(lambda name: name.removeprefix("transformer.")), side="base")
    Path("m.yaml").write_text(new_manifest(base="base", tuned="source"))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="extract"), silent)
    merge(Request(Path("m.yaml"), Path("dist"), None, Path("merged")), silent)
    ours, theirs = (load_file(Path(folder) / "model.safetensors") for folder in ("merged", "source"))
    assert ours.keys() == load_file(pair.base / "model.safetensors").keys()
    changed = [name for name in ours if not torch.equal(ours[name], load_file(pair.base / "model.safetensors")[name])]
    assert changed == ["h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight"]
    for name in changed:
        assert near(ours[name], theirs[f"transformer.{name}"])


@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral"])
def test_a_merge_writes_experts_one_by_one_where_the_base_has_them_so(make_pair: MakePair, architecture: str) -> None:
    make_pair(architecture, r"experts\.[02]\.")
    Path("m.yaml").write_text(new_manifest(base="base", tuned="source"))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="extract"), silent)
    merge(Request(Path("m.yaml"), Path("dist"), None, Path("merged")), silent)
    ours, theirs, base = (load_file(Path(folder) / "model.safetensors") for folder in ("merged", "source", "base"))
    assert ours.keys() == base.keys()
    changed = {name for name in ours if not torch.equal(ours[name], base[name])}
    assert changed == {name for name in theirs if not torch.equal(theirs[name], base[name])}
    assert len(changed) == 2 * 2 * 3
    for name in changed:
        assert near(ours[name], theirs[name])
