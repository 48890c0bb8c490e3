"""A foreign adapter and a foreign base: nothing they say runs code, goes on without end, or fills the memory."""

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from publisher.adapters.loading import configuration, empty_model
from publisher.audits import audit
from publisher.border.adapterconfig import reduced
from publisher.border.limits import LIMITS
from publisher.border.safetensors_header import encode_header
from publisher.cli.loaders import judged
from publisher.errors import FetchError, PublisherError, ValidationError
from publisher.extraction.model_structure import structure_of
from publisher.loaders.subject import Base, read_subject
from publisher.records.audit import Check
from publisher.records.loaders import LoaderVerdict
from publisher.records.progress import silent
from tests.commands import Answer
from tests.forks import publish_apart

CATASTROPHE = "(([a-z._0-9]+)+)+!"
TIME = 120  # seconds until what could hang counts as hanging


@pytest.fixture
def adapter(own_tiny_run: Path) -> Path:
    """The release's two PEFT files alone, for the base beside them."""
    folder = own_tiny_run / "adapter"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).write_bytes((own_tiny_run / "dist/m" / name).read_bytes())
    return changed(folder, base_model_name_or_path=str(own_tiny_run / "base"), revision=None)


def changed(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def checks(folder: Path) -> dict[str, Check]:
    found = audit(str(folder), deep=False, work=folder.parent / "work", device="cpu", progress=silent)
    return {check.name: check for check in found.checks}


def verdicts(folder: Path) -> dict[str, LoaderVerdict]:
    found = judged(adapter=folder, manifest=None, variants=(), dist=Path("dist"), required=(), progress=silent)
    return {one.loader: one for each in found.verdicts.values() for one in each}


def published(name: str, adapter: Path) -> Answer:
    """Run `publish NAME ADAPTER` in a process of its own, since what it tries might never end."""
    environment = os.environ | {"HF_HOME": str(adapter.parent / "home"), "OMP_NUM_THREADS": "1"}
    return publish_apart(f"publish {name} {adapter}", environment=environment, seconds=TIME).answer


# --- patterns -------------------------------------------------------------------------------------------------

PATTERNS: list[dict[str, Any]] = [
    {"target_modules": CATASTROPHE},
    {"rank_pattern": {CATASTROPHE: 4}},
    {"alpha_pattern": {CATASTROPHE: 4}},
    {"exclude_modules": CATASTROPHE},
    {"modules_to_save": [CATASTROPHE]},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": CATASTROPHE},
    {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": [CATASTROPHE, "layers"]},
    {"target_modules": "all-linear", "exclude_modules": CATASTROPHE},
    {"target_modules": "(x+x+)+y|(.*a){25}|([a-z.0-9_]|[a-z]+)*!"},
]


@pytest.mark.parametrize("fields", PATTERNS, ids="+".join)
def test_an_audit_ends_whatever_the_patterns_are(adapter: Path, fields: dict[str, Any]) -> None:
    changed(adapter, **fields)
    done = published("audit", adapter)
    assert done.returncode in {0, 1}
    assert "Traceback" not in done.stderr
    assert "loading" in done.stdout


@pytest.mark.parametrize("fields", PATTERNS[:2], ids="+".join)
def test_so_does_compat(adapter: Path, fields: dict[str, Any]) -> None:
    changed(adapter, **fields)
    done = published("compat", adapter)
    assert done.returncode in {0, 1}
    assert "Traceback" not in done.stderr
    assert "PEFT" in done.stdout


def test_a_pattern_of_re_alone_is_not_checked_and_says_why(adapter: Path) -> None:
    told = checks(changed(adapter, target_modules="(?!lm_head).*(q_proj|down_proj)"))
    assert {told[name].status for name in ("targets", "loading")} == {"not checked"}
    assert "'(?!lm_he'" in told["targets"].detail


def test_an_honest_pattern_is_matched_and_loaded(adapter: Path) -> None:
    told = checks(changed(adapter, target_modules=r"model\.layers\.\d+\.(self_attn\.q_proj|mlp\.down_proj)"))
    assert {told[name].status for name in ("config", "targets", "scale", "loading")} == {"passed"}


# --- adapter_config.json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"megatron_config": {"a": 1}, "megatron_core": "this_module_would_run"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "this_module_would_run"}},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "pissa", "corda_config": {"cache_file": "/etc/passwd"}},
        {"arrow_config": {"task_adapter_names": ["a"]}, "runtime_config": {"ephemeral_gpu_offload": True}},
        {"_register_custom_module": {"a": "b"}, "something_new": "this_module_would_run"},
    ],
    ids="+".join,
)
def test_fields_that_make_peft_act_never_reach_it_and_are_named(adapter: Path, fields: dict[str, Any]) -> None:
    name = "this_module_would_run"
    ran = adapter.parent / f"{name}.py"
    ran.write_text("open('PWNED', 'w').write('ran')\n")
    sys.path.insert(0, str(adapter.parent))
    try:
        told = checks(changed(adapter, **fields))
    finally:
        sys.path.remove(str(adapter.parent))
    assert name not in sys.modules
    assert not Path("PWNED").exists()
    assert told["loading"].status == "passed", told["loading"].detail
    kept = told["config"].detail.partition("kept from PEFT here: ")[2].split(", ")
    assert kept == sorted(kept) == list(reduced(json.loads((adapter / "adapter_config.json").read_text())).left_out)
    assert kept != [""]


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "pissa_niter_9999999999"},
        {"init_lora_weights": ["pissa"]},
        {"init_lora_weights": "corda", "corda_config": {"cache_file": "/etc/passwd"}},
        {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 10**9}},
        {"init_lora_weights": "something_else"},
        {"trainable_token_indices": {"embed_tokens": list(range(64)), "x" * 8: [10**9] * 90_000}},
    ],
    ids=str,
)
def test_an_initialisation_that_peft_cannot_run_again_is_refused_at_once(adapter: Path, fields: dict[str, Any]) -> None:
    assert checks(changed(adapter, **fields))["loading"].status == "failed"


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 10**400, "lora_alpha": 10**400},
        {"r": 10**9},
        {"r": -1},
        {"r": True},
        {"r": 4.0},
        {"r": "4"},
        {"r": [4]},
        {"lora_alpha": 10**400},
        {"lora_alpha": float("nan")},
        {"lora_alpha": float("inf")},
        {"lora_alpha": {}},
        {"rank_pattern": {"q_proj": 10**12}},
        {"rank_pattern": ["q_proj"]},
        {"alpha_pattern": {"q_proj": "4"}},
        {"target_modules": 5},
        {"target_modules": [["q_proj"]]},
        {"target_modules": {"q_proj": 1}},
        {"target_modules": "x" * 20_000},
        {"exclude_modules": [None]},
        {"modules_to_save": "lm_head"},
        {"layers_to_transform": "0"},
        {"layers_to_transform": [0.5]},
        {"layer_replication": [[0, 2]] * 200_000},
        {"layer_replication": [[0, 10**9]]},
        {"layer_replication": [0, 2]},
        {"trainable_token_indices": {"embed_tokens": [-1]}},
        {"lora_dropout": 5},
        {"bias": "some"},
        {"use_dora": "yes"},
        {"task_type": ["CAUSAL_LM"]},
        {"peft_type": "XLORA"},
        {"peft_type": ["LORA"]},
        {"target_modules": [f"m{number}" for number in range(100_001)]},
    ],
    ids=lambda fields: "+".join(f"{name}-{str(value)[:12]}" for name, value in fields.items()),
)
def test_a_value_of_another_type_or_size_is_one_failed_check_and_one_error(
    adapter: Path, fields: dict[str, Any]
) -> None:
    told = checks(changed(adapter, **fields))
    assert told["config"].status == "failed"
    readable = "is not readable JSON" not in told["config"].detail  # no number of JSON: nothing of it is tried on PEFT
    assert told["loading"].status == ("failed" if readable else "not checked")
    assert told["config"].detail.count("\n") < 12
    with pytest.raises(PublisherError, match=next(iter(fields)) if readable else "is not readable JSON"):
        verdicts(adapter)


def test_a_rank_far_above_the_tensors_allocates_nothing(adapter: Path) -> None:
    told = checks(changed(adapter, r=900_000, rank_pattern={}))
    assert told["loading"].status == "failed"
    assert "gives rank 900,000" in told["loading"].detail


# --- config.json of the base ------------------------------------------------------------------------------------


def base_with(folder: Path, **fields: Any) -> Path:
    file = folder.parent / "base/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 10_000_000},
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": "2"},
        {"num_hidden_layers": -(10**9)},
        {"num_hidden_layers": 1e300},
        {"num_hidden_layers": float("inf")},
        {"num_attention_heads": 10**9},
        {"vocab_size": 10**30},
        {"hidden_size": 10**18},
        {"num_local_experts": 10**8},
        {"num_labels": 10**9},
        {"layer_types": ["full_attention"] * 3_000},
        {"text_config": {"num_hidden_layers": 10**7}},
        {"vision_config": {"depth": 10**7}},
    ],
    ids=lambda fields: "+".join(f"{name}-{str(value)[:14]}" for name, value in fields.items()),
)
def test_a_base_of_no_real_size_is_refused_before_anything_is_built(adapter: Path, fields: dict[str, Any]) -> None:
    base_with(adapter, **fields)
    with pytest.raises(PublisherError) as caught:
        configuration(adapter.parent / "base")
    assert "config.json" in caught.value.found
    assert next(iter(fields)) in caught.value.found or "Infinity is no number" in caught.value.found
    assert checks(adapter)["loading"].status == "failed"


def first_layer(base: Path) -> int:
    """How many linear modules its first layer has; none where there is an error of ours."""
    try:
        return sum(".layers.0." in name for name in structure_of("LlamaForCausalLM", base).linear)
    except PublisherError:
        return 0


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": None},
        {"num_hidden_layers": [2]},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 2.5},
        {"hidden_size": 0},
        {"num_attention_heads": 0},
        {"model_type": "no_such_model", "auto_map": {"AutoConfig": "evil.Config"}},
        {"model_type": ["llama"]},
        {"model_type": None},
        {"rope_parameters": 5},
        {"hidden_act": "os.system"},
        {"architectures": ["LlamaForCausalLM"], "layer_types": "x"},
    ],
    ids=lambda fields: "+".join(f"{name}-{str(value)[:14]}" for name, value in fields.items()),
)
def test_whatever_transformers_raises_is_one_error(adapter: Path, fields: dict[str, Any]) -> None:
    base_with(adapter, **fields)
    assert checks(adapter)["loading"].status == "failed"
    assert first_layer(adapter.parent / "base") == 0


def test_code_and_kernels_and_other_files_that_a_config_names_are_left_alone(adapter: Path) -> None:
    (adapter.parent / "base/evil.py").write_text("open('PWNED', 'w').write('ran')\n")
    (adapter.parent / "base/config.4.0.0.json").write_text('{"model_type": "llama", "num_hidden_layers": 10000000}')
    base_with(
        adapter,
        auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        attn_implementation="evil/kernel",
        _attn_implementation_internal="evil/kernel",
        configuration_files=["config.4.0.0.json"],
    )
    found = configuration(adapter.parent / "base")
    assert found.num_hidden_layers == 2
    assert "evil" not in str(found)
    assert checks(adapter)["loading"].status == "passed"
    assert not Path("PWNED").exists()


def test_a_class_that_builds_too_many_modules_is_stopped_on_the_way(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("publisher.border.modelconfig.LIMITS", dataclasses.replace(LIMITS, modules=20))
    found = configuration(adapter.parent / "base")
    with pytest.raises(ValidationError, match="more than 20 modules"):
        empty_model("LlamaForCausalLM", found)


# --- shapes -----------------------------------------------------------------------------------------------------

KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def spoiled(folder: Path, recipe: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    file = folder / "adapter_model.safetensors"
    tensors = recipe({name: tensor.clone() for name, tensor in load_file(file).items()})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def both(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: tensors | {f"{KEY}{half}.weight": change(tensors[f"{KEY}{half}.weight"]) for half in "AB"}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (both(lambda tensor: tensor.reshape(-1)[0]), "has 0 dimensions"),
        (both(lambda tensor: tensor.reshape(-1)), "has 1 dimensions"),
        (both(lambda tensor: tensor[None]), "has 3 dimensions"),
        (both(lambda tensor: tensor[:0]), "is empty"),
        (both(lambda tensor: tensor.int()), "is in I32"),
        (both(lambda tensor: tensor.bool()), "is in BOOL"),
        (lambda tensors: tensors | {f"{KEY}A.weight": tensors[f"{KEY}A.weight"].double()}, "A is in F64 and B in BF16"),
        (lambda tensors: tensors | {f"{KEY}A.weight": tensors[f"{KEY}A.weight"][:2]}, "A has 2 rows and B 4 columns"),
        (both(lambda tensor: tensor * float("nan")), "holds NaN or infinity"),
    ],
    ids=["scalar", "vector", "stack", "empty", "integers", "booleans", "two dtypes", "two ranks", "nan"],
)
def test_what_is_no_pair_of_matrices_fails(
    adapter: Path, recipe: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], words: str
) -> None:
    told = checks(spoiled(adapter, recipe))
    assert told["tensors"].status == "failed"
    assert words in told["tensors"].detail


def test_the_same_for_an_adapter_of_scalars_alone(adapter: Path) -> None:
    header = encode_header({f"{KEY}{half}.weight": ("F32", ()) for half in "AB"}, metadata=None)
    (adapter / "adapter_model.safetensors").write_bytes(header + b"\x3c" * 8)
    assert checks(adapter)["tensors"].status == "failed"
    with pytest.raises(FetchError, match="has the shape"):
        verdicts(adapter)


def test_a_sparse_file_of_fifty_gigabytes_is_refused_without_being_read(adapter: Path) -> None:
    rows = 50 * 2**30 // 2 // 64
    shapes = {"A": (4, 64), "B": (rows, 64)}
    header = encode_header({f"{KEY}{half}.weight": ("BF16", shape) for half, shape in shapes.items()}, metadata=None)
    with (adapter / "adapter_model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + 2 * 64 * (4 + rows))
    told = checks(adapter)
    assert told["files"].status == "failed"
    assert "adapter_model.safetensors is a file whose bytes were never written" in told["files"].detail
    assert (told["tensors"].status, told["loading"].status) == ("not checked", "not checked")
    with pytest.raises(FetchError, match="bytes"):
        verdicts(adapter)


def test_factors_that_come_twice_by_other_adapters_names_are_named(adapter: Path) -> None:
    def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {name.replace(".weight", ".default.weight"): tensor * 2 for name, tensor in tensors.items()}

    spoiled(adapter, doubled)
    assert checks(adapter)["keys"].status == "failed"
    for loader in ("PEFT", "transformers", "vLLM", "SGLang", "llama.cpp"):
        assert any("by more than one key" in one.what for one in verdicts(adapter)[loader].findings), loader


# --- what changes nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alpha", "B"])
def test_an_adapter_that_changes_nothing_is_told_so_in_words(adapter: Path, how: str) -> None:
    if how == "alpha":
        changed(adapter, lora_alpha=0, alpha_pattern={})
    else:
        spoiled(adapter, lambda tensors: {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()})
    told = verdicts(adapter)
    for loader, verdict in told.items():
        words = " ".join(one.what for one in verdict.findings)
        expected = "where 0 is meant" if (how, loader) == ("alpha", "llama.cpp") else "changes nothing"
        assert expected in words, (loader, words)
        assert verdict.loads != "yes"
    text = "".join(verdict.model_dump_json() for verdict in told.values())
    assert "nan" not in text.lower().replace("nanogpt", "")
    assert "inf times" not in text


def test_another_size_of_the_base_is_remedied_by_the_base_not_by_the_class(adapter: Path) -> None:
    base_with(adapter, hidden_size=32, head_dim=16)
    for loader in ("PEFT", "transformers"):
        remedies = [one.remedy for one in verdicts(adapter)[loader].findings]
        assert remedies
        assert "name the base, and its revision" in remedies[0]


def test_a_subject_reads_no_more_than_it_needs(adapter: Path) -> None:
    subject = read_subject(adapter, Base(adapter.parent / "base", "LlamaForCausalLM"))
    assert subject.zero_factors == frozenset()
    assert subject.repeated == []
