"""Each trap: an adapter of that kind, the verdict on it, and where the loader is here, what it really does with it."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

from publisher.adapters.loading import quiet
from publisher.records.loaders import LoaderVerdict
from publisher.records.validation import Validation
from tests.loaders.conftest import LINEAR, SUFFIXES, Made, Make

EVERY = ("PEFT", "transformers", "vLLM", "SGLang", "llama.cpp", "MLX")


def loads(judged: dict[str, LoaderVerdict] | Any) -> dict[str, str]:
    return {loader: verdict.loads for loader, verdict in judged.items()}


def told(verdict: LoaderVerdict) -> str:
    return "; ".join(found.what for found in verdict.findings)


def kinds(verdict: LoaderVerdict) -> set[str]:
    return {found.kind for found in verdict.findings}


def loaded_with_peft(made: Made, model: Any = None) -> tuple[Any, list[str]]:
    """What a user does, with real weights, and what PEFT warns of."""
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = json.loads((made.base / "config.json").read_text())["architectures"][0]
        model = model or getattr(transformers, name).from_pretrained(made.base)
        loaded = peft.PeftModel.from_pretrained(model, made.folder)
    return loaded, [str(entry.message) for entry in caught if issubclass(entry.category, UserWarning)]


def filled(model: Any) -> tuple[int, int]:
    """Modules whose B is not zero, and adapted modules."""
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    return sum(bool(layer.lora_B["default"].weight.any()) for layer in layers), len(layers)


def scales(model: Any) -> set[float]:
    return {layer.scaling["default"] for layer in model.modules() if isinstance(layer, LoraLayer)}


# --- what loads ---------------------------------------------------------------------------------------------


def test_an_adapter_of_one_rank_for_a_llama_loads_everywhere_but_in_mlx(make: Make) -> None:
    made = make()
    judged = made.judged()
    assert tuple(judged) == EVERY
    assert loads(judged) == dict.fromkeys(EVERY, "yes") | {"MLX": "no"}
    assert {judged[name].scale for name in EVERY[:5]} == {"right"}
    assert [judged[name].basis for name in EVERY] == ["executed", "executed", "read", "read", "read", "read"]
    assert judged["PEFT"].version == peft.__version__
    assert judged["MLX"].findings[0].what == (
        "it looks for adapters.safetensors, and for num_layers and lora_parameters in adapter_config.json"
    )
    assert filled(loaded_with_peft(made)[0]) == (28, 28)


def test_gpt2s_transposed_weights_load_with_peft_and_vllm_has_no_lora_for_the_class(make: Make) -> None:
    made = make("GPT2LMHeadModel", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    judged = made.judged()
    assert loads(judged) == {
        "PEFT": "yes",
        "transformers": "yes",
        "vLLM": "no",
        "SGLang": "not told",
        "llama.cpp": "not told",
        "MLX": "no",
    }
    assert told(judged["vLLM"]) == "vLLM serves GPT2LMHeadModel without LoRA"
    assert judged["SGLang"].notes == ("which modules SGLang adapts in GPT2LMHeadModel was not looked into",)


def test_all_of_a_qwen_loads_where_linear_attention_is_known(qwen: Made) -> None:
    judged = qwen.judged()
    assert loads(judged) == {
        "PEFT": "yes",
        "transformers": "yes",
        "vLLM": "yes",
        "SGLang": "no",
        "llama.cpp": "no",
        "MLX": "no",
    }
    assert told(judged["SGLang"]) == (
        "12 modules that SGLang has no place for in this model: in_proj_a, in_proj_b, in_proj_qkv, in_proj_z"
    )
    assert told(judged["llama.cpp"]) == "the converter cannot reorder the columns of 3 out_proj modules"


def test_equally_many_value_and_key_heads_need_no_reordering(qwen: Made, base_of: Callable[..., Path]) -> None:
    plain = base_of("Qwen3_5ForConditionalGeneration", linear_num_key_heads=4)
    assert "unsupported model" not in kinds(qwen.on(plain).judged()["llama.cpp"])


@pytest.mark.parametrize(("rank", "flags"), [(16, ()), (17, ("--max-lora-rank 32",)), (256, ("--max-lora-rank 256",))])
def test_vllm_needs_the_smallest_permitted_rank_that_holds_the_adapters(
    make: Make, rank: int, flags: tuple[str, ...]
) -> None:
    verdict = make(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"]).judged()["vLLM"]
    assert (verdict.loads, verdict.flags) == ("yes", ("--enable-lora", *flags))


def test_a_rank_above_all_that_vllm_permits_is_no(make: Make) -> None:
    verdict = make(r=513, lora_alpha=513, target_modules=["v_proj"]).judged()["vLLM"]
    assert (verdict.loads, told(verdict)) == ("no", "rank 513 is above 512, the largest --max-lora-rank")


def test_modules_of_the_vision_tower_need_a_flag_of_vllm_and_are_nothing_to_llama_cpp(make: Make) -> None:
    judged = make("Qwen3_5ForConditionalGeneration", target_modules=["linear_fc1"]).judged()
    assert judged["vLLM"].flags == ("--enable-lora", "--enable-tower-connector-lora")
    assert "whose names the converter cannot map, as model.visual." in told(judged["llama.cpp"])


def test_an_adapter_in_a_subfolder_is_fetched_by_hand_for_servers_that_know_none(make: Make) -> None:
    judged = make().judged(subfolder="small")
    note = "it takes no subfolder of a repository: download small/ and name the local folder"
    assert [loader for loader in EVERY if note in judged[loader].notes] == ["SGLang"]


def test_vllm_serves_a_subfolder_by_its_bundled_resolver(make: Make) -> None:
    (note,) = make().judged(subfolder="small")["vLLM"].notes
    settings = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "VLLM_PLUGINS=lora_hf_hub_resolver",
        "VLLM_LORA_RESOLVER_HF_REPO_LIST=REPO",
        "ask for the model REPO/small",
    )
    assert [setting for setting in settings if setting not in note] == []


# --- T1, T4: nothing reaches a module, and nothing says so ----------------------------------------------------


def test_on_the_text_only_class_peft_changes_nothing_and_only_warns(qwen: Made, base_of: Callable[..., Path]) -> None:
    text = qwen.on(base_of("Qwen3_5ForCausalLM"))
    verdict = text.judged()["PEFT"]
    assert (verdict.loads, verdict.scale, kinds(verdict)) == ("wrongly", "none", {"silent no-op"})
    model, warned = loaded_with_peft(text)
    assert filled(model) == (0, 31)
    assert len(warned) == 1
    assert qwen.judged()["PEFT"].notes == (
        "on Qwen3_5ForCausalLM, which AutoModelForCausalLM builds, it changes nothing, and PEFT only warns",
    )


def test_there_transformers_and_vllm_find_the_modules_by_their_other_names(
    qwen: Made, base_of: Callable[..., Path]
) -> None:
    text = qwen.on(base_of("Qwen3_5ForCausalLM"))
    judged = text.judged()
    assert (judged["transformers"].loads, judged["vLLM"].loads) == ("yes", "yes")
    with quiet():
        model = transformers.Qwen3_5ForCausalLM.from_pretrained(text.base)
        model.load_adapter(str(text.folder))
    assert filled(model) == (31, 31)


def test_full_names_turn_it_into_an_error(qwen: Made, base_of: Callable[..., Path]) -> None:
    names = [name.partition("base_model.model.")[2].partition(".lora_")[0] for name in weights(qwen)]
    text = qwen.change(target_modules=sorted(set(names))).on(base_of("Qwen3_5ForCausalLM"))
    judged = text.judged()
    assert (judged["PEFT"].loads, kinds(judged["PEFT"])) == ("no", {"unreadable"})
    assert judged["transformers"].loads == "no"
    assert "Target modules {…} not found in the base model" in told(judged["PEFT"])
    with pytest.raises(ValueError, match="not found in the base model"):
        loaded_with_peft(text)
    assert qwen.judged()["PEFT"].notes == ("on Qwen3_5ForCausalLM, which AutoModelForCausalLM builds, PEFT refuses it",)


def weights(made: Made) -> dict[str, torch.Tensor]:
    return load_file(made.folder / "adapter_model.safetensors")


def test_names_without_pefts_prefix_reach_nothing_with_peft(make: Make) -> None:
    made = make().rename(lambda name: name.removeprefix("base_model.model."))
    assert kinds(made.judged()["PEFT"]) == {"silent no-op"}
    assert filled(loaded_with_peft(made)[0]) == (0, 28)


def test_names_of_the_text_only_class_reach_nothing_with_peft_and_are_found_by_vllm(qwen: Made) -> None:
    made = qwen.rename(lambda name: name.replace("model.language_model.", "model."))
    judged = made.judged()
    assert kinds(judged["PEFT"]) == {"silent no-op"}
    assert filled(loaded_with_peft(made)[0]) == (0, 31)
    assert judged["vLLM"].loads == "yes"


def test_names_of_no_class_are_dropped_by_vllm_without_a_word(make: Make) -> None:
    verdict = make().rename(lambda name: name.replace("model.layers.", "decoder.layers.")).judged()["vLLM"]
    assert (verdict.loads, verdict.scale, kinds(verdict)) == ("wrongly", "none", {"silent no-op"})


def test_the_adapters_name_in_a_key_is_borne_by_peft_and_by_no_other(make: Make) -> None:
    made = make().rename(lambda name: name.replace(".weight", ".default.weight"))
    judged = made.judged()
    assert filled(loaded_with_peft(made)[0]) == (28, 28)
    assert judged["PEFT"].loads == "yes"
    assert (judged["vLLM"].loads, judged["llama.cpp"].loads) == ("no", "no")
    assert kinds(judged["vLLM"]) == {"refused tensor"}


# --- T2, T3: the scale --------------------------------------------------------------------------------------


def patterned(make: Make, **settings: Any) -> Made:
    return make(r=8, lora_alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"k_proj": 2}, **settings)


def test_mixed_ranks_under_one_alpha_are_scaled_wrongly_by_llama_cpp(make: Make) -> None:
    judged = patterned(make).judged()
    assert scales(loaded_with_peft(patterned(make))[0]) == {1.0}
    assert (judged["PEFT"].loads, judged["PEFT"].scale, judged["vLLM"].scale) == ("yes", "right", "right")
    verdict = judged["llama.cpp"]
    assert (verdict.loads, verdict.scale) == ("wrongly", "wrong")
    assert told(verdict).startswith("4 modules at 4 times the scale: ")
    assert verdict.findings[0].modules == 4
    assert "layout: uniform" in verdict.findings[0].remedy


def test_sglang_refuses_mixed_ranks_for_its_buffers_and_uniform_ones_load(make: Make) -> None:
    verdict = patterned(make).judged()["SGLang"]
    assert (verdict.loads, verdict.scale) == ("no", "right")
    assert told(verdict) == "4 modules of another rank than r, and SGLang's buffers have one rank"


def test_a_forgotten_alpha_pattern_is_found_where_the_scale_is_known(make: Make) -> None:
    made = patterned(make).change(alpha_pattern={})
    assert scales(loaded_with_peft(made)[0]) == {1.0, 4.0}
    assert made.judged()["PEFT"].scale == "right", "an adapter that was trained so is right so"
    (made.folder / "extraction.json").write_text("{}")
    judged = made.judged()
    for loader in ("PEFT", "transformers", "vLLM", "llama.cpp"):
        assert (judged[loader].loads, judged[loader].scale) == ("wrongly", "wrong"), loader
        assert told(judged[loader]).startswith("4 modules at 4 times the scale: "), loader


def test_rslora_is_right_with_peft_and_vllm_and_unknown_to_the_others(make: Make) -> None:
    made = make(r=4, lora_alpha=8, use_rslora=True)
    judged = made.judged()
    assert scales(loaded_with_peft(made)[0]) == {8 / math.sqrt(4)}
    assert [judged[name].scale for name in EVERY] == ["right", "right", "right", "wrong", "wrong", "none"]
    assert told(judged["llama.cpp"]).startswith("28 modules at 0.5 times the scale: ")
    assert "lora_alpha" in judged["llama.cpp"].findings[0].remedy


def test_earlier_releases_of_vllm_that_knew_no_patterns_are_warned_of_where_it_matters(make: Make) -> None:
    note = "releases that ignore rank_pattern and alpha_pattern scale some modules wrongly"
    assert note not in patterned(make).judged()["vLLM"].notes, "alpha / rank is one in every module"
    assert note in make(alpha_pattern={"k_proj": 32}).judged()["vLLM"].notes


# --- T5, T6: modules that the other side lacks ----------------------------------------------------------------


def test_an_adapter_for_more_layers_than_the_base_has_is_half_lost_without_a_word(
    make: Make, base_of: Callable[..., Path]
) -> None:
    made = make().on(base_of("LlamaForCausalLM", num_hidden_layers=2))
    judged = made.judged()
    assert loads(judged) == {
        "PEFT": "wrongly",
        "transformers": "wrongly",
        "vLLM": "wrongly",
        "SGLang": "no",
        "llama.cpp": "no",
        "MLX": "no",
    }
    model, warned = loaded_with_peft(made)
    assert (filled(model), warned) == ((14, 14), [])
    assert told(judged["PEFT"]) == "28 tensors of the file PEFT drops without a word"
    assert judged["PEFT"].findings[0].modules == judged["vLLM"].findings[0].modules == 14


def test_modules_adapted_without_a_tensor_are_counted(make: Make) -> None:
    made = make(layers_to_transform=[2, 3]).change(layers_to_transform=None)
    verdict = made.judged()["PEFT"]
    model, warned = loaded_with_peft(made)
    assert (filled(model), len(warned)) == ((14, 28), 1)
    assert (verdict.loads, told(verdict)) == ("wrongly", "14 modules adapted for which the file has nothing")


def test_half_a_module_is_an_error_everywhere(make: Make) -> None:
    lone = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    judged = make().rename(lambda name: None if name == lone else name).judged()
    assert [judged[name].loads for name in EVERY[2:5]] == ["no"] * 3
    assert "one of the two factors is missing in 1 module" in told(judged["vLLM"])
    assert judged["PEFT"].loads == "wrongly"


def test_sglang_packs_q_with_v_and_gate_with_up(make: Make) -> None:
    judged = make(target_modules=["q_proj", "up_proj"]).judged()
    assert judged["PEFT"].loads == "yes"
    assert told(judged["SGLang"]) == (
        "8 modules without the others that SGLang packs with it, as model.layers.0.mlp.up_proj"
    )


# --- fields that are refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"use_dora": True}, "use_dora is set"),
        ({"lora_bias": True}, "lora_bias is set"),
        ({"bias": "all"}, "bias is all"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa, which changes the base's weights"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save other than classifier and score: lm_head"),
        ({"rank_pattern": {"k_proj": 4.0}}, "ranks that are no whole numbers above zero: k_proj"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is set"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_vllm_refuses_fields_that_would_change_what_the_adapter_is(
    make: Make, fields: dict[str, Any], complaint: str
) -> None:
    verdict = make(target_modules=["q_proj", "v_proj"]).change(**fields).judged()["vLLM"]
    assert verdict.loads == "no"
    assert complaint in told(verdict)


def test_initial_weights_that_leave_the_base_alone_are_no_matter(make: Make) -> None:
    assert make().change(init_lora_weights="gaussian").judged()["vLLM"].loads == "yes"


def test_a_missing_field_is_refused_by_vllm(make: Make) -> None:
    made = make()
    file = made.folder / "adapter_config.json"
    file.write_text(json.dumps({name: value for name, value in made.config.items() if name != "target_modules"}))
    assert told(made.judged()["vLLM"]) == "target_modules is missing in adapter_config.json"
    assert "target_modules is no list" in told(made.judged()["SGLang"])


def test_a_pattern_in_target_modules_is_refused_by_sglang_alone(make: Make) -> None:
    judged = make(target_modules=rf".*\.({'|'.join(SUFFIXES)})").judged()
    assert loads(judged) == dict.fromkeys(EVERY, "yes") | {"SGLang": "no", "MLX": "no"}
    assert told(judged["SGLang"]) == "target_modules is a pattern, and SGLang takes a list"


def test_a_module_carried_whole_is_loaded_by_peft_and_dropped_or_refused_elsewhere(make: Make) -> None:
    made = make(modules_to_save=["lm_head"])
    judged = made.judged()
    assert loads(judged) == {
        "PEFT": "yes",
        "transformers": "yes",
        "vLLM": "no",
        "SGLang": "wrongly",
        "llama.cpp": "no",
        "MLX": "no",
    }
    assert "drops without a word, as base_model.model.lm_head.weight" in told(judged["SGLang"])
    model, _ = loaded_with_peft(made)
    whole = weights(made)["base_model.model.lm_head.weight"]
    assert torch.equal(model.base_model.model.lm_head.modules_to_save["default"].weight, whole)


def test_dora_is_loaded_by_peft_and_loses_its_magnitudes_in_transformers(make: Make) -> None:
    made = make(use_dora=True)
    judged = made.judged()
    assert [judged[name].loads for name in EVERY] == ["yes", "wrongly", "no", "no", "no", "no"]
    assert told(judged["transformers"]) == "28 tensors of the file load_adapter drops without a word"
    key = "model.layers.0.mlp.up_proj.lora_magnitude_vector"
    magnitude = weights(made)[f"base_model.model.{key}"]
    with quiet():
        model = transformers.LlamaForCausalLM.from_pretrained(made.base)
        seen = model.load_adapter(str(made.folder))
    assert f"{key}.default" in seen.unexpected_keys
    loaded = loaded_with_peft(made)[0].base_model.model
    assert torch.equal(loaded.get_parameter(f"{key}.default.weight"), magnitude)


# --- whose judgement it is --------------------------------------------------------------------------------------


def test_after_a_validation_peft_is_not_run_again_and_its_version_is_the_validations(make: Make) -> None:
    validation = Validation(
        path="/",
        modules=28,
        tensors=56,
        largest_claim_difference=0.0,
        function=None,
        function_skipped=None,
        packages={"peft": "0.18.0"},
    )
    made = make().rename(lambda name: name.removeprefix("base_model.model."))
    verdict = made.judged(validation)["PEFT"]
    assert (verdict.loads, verdict.version, verdict.basis) == ("yes", "0.18.0", "executed")


def test_why_outputs_were_not_compared_is_a_note_on_peft(make: Make) -> None:
    reason = "the forward of LlamaForCausalLM takes past_values, which are not made here"
    validation = Validation(
        path="/",
        modules=28,
        tensors=56,
        largest_claim_difference=0.0,
        function=None,
        function_skipped=reason,
        incomparable=reason,
        packages={"peft": "0.18.0"},
    )
    verdicts = make().judged(validation)
    assert f"its outputs were not compared with the source's: {reason}" in verdicts["PEFT"].notes


VLLM_READER = """
class PEFTHelper:
    def __init__(self, config):
        self.config, self.vllm_lora_scaling_factor = config, config["lora_alpha"] / config["r"]

    @classmethod
    def from_dict(cls, config):
        return cls(config)

    def validate_legal(self, limits):
        if self.config.get("use_rslora") or self.config["r"] > limits.max_lora_rank:
            raise ValueError("this release takes no rslora")
"""
SGLANG_READER = """
class LoRAConfig:
    def __init__(self, config):
        self.r, self.lora_alpha = config["r"], 3 * config["lora_alpha"]

    @classmethod
    def from_dict(cls, config):
        return cls(config)
"""


def install(folder: Path, module: str, source: str, *, version: str) -> None:
    """A package that can be imported and has a version, as pip leaves one."""
    file = folder / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    info = folder / f"{module.partition('.')[0]}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {module.partition('.')[0]}\nVersion: {version}\n")


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Releases of vLLM and SGLang of which nothing is there but what reads adapter_config.json."""
    install(tmp_path / "site", "vllm.lora.peft_helper", VLLM_READER, version="0.7.9")
    install(tmp_path / "site", "sglang.srt.lora.lora_config", SGLANG_READER, version="0.4.9")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in {"vllm", "sglang"}]:
        del sys.modules[name]


@pytest.mark.usefixtures("readers")
def test_a_reader_that_is_installed_is_run_and_its_release_named(make: Make) -> None:
    judged = make(alpha_pattern={"k_proj": 8}).judged()
    vllm, sglang = judged["vLLM"], judged["SGLang"]
    assert (vllm.version, vllm.basis, vllm.loads) == ("0.7.9", "reader executed", "wrongly")
    assert told(vllm).startswith("4 modules at 0.5 times the scale: ")
    assert (sglang.version, sglang.basis, sglang.scale) == ("0.4.9", "reader executed", "wrong")
    refused = make(use_rslora=True).judged()["vLLM"]
    assert refused.loads == "no"
    assert told(refused).startswith("this release takes no rslora; ")


def test_every_linear_of_the_small_qwen_is_meant(qwen: Made) -> None:
    names = {name.partition(".lora_")[0].rpartition(".")[2] for name in weights(qwen)}
    assert names == set(LINEAR)
