"""What an input is gets named: each format that is not read, as source and as base, by `publish new` and by fetch."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from publisher.checkpoints.folder_formats import FOLDER_FORMATS
from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.tensor_formats import METHODS, OTHER_FORMATS, WEIGHT_FORMATS
from publisher.errors import FetchError
from publisher.manifest.new import new_manifest
from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.records.progress import silent

DOCS = (Path(__file__).parents[2] / "docs/inputs.md").read_text(encoding="utf-8")
Q, NORM = "model.layers.0.self_attn.q_proj", "model.norm.weight"
FP8, BYTES, WORDS = torch.float8_e4m3fn, torch.uint8, torch.int32
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plain() -> Tensors:
    return {f"{Q}.weight": torch.ones(32, 16, dtype=torch.bfloat16), NORM: torch.ones(16, dtype=torch.bfloat16)}


def write(folder: str, tensors: Tensors, config: Config | None = None, **beside: str) -> Path:
    """A folder as save_pretrained writes it; `beside` has the text of further files, with `__` for a dot."""
    place = Path(folder)
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | (config or {})))
    for name, text in beside.items():
        (place / name.replace("__", ".")).write_text(text)
    return place


def packed(endings: dict[str, torch.Tensor]) -> Tensors:
    """A checkpoint of which one module is stored in these tensors."""
    return {NORM: plain()[NORM]} | {f"{Q}{ending}": tensor for ending, tensor in endings.items()}


def refusal(folder: str) -> str:
    """What `publish new` says of a source or a base, which is what fetch says of it before any weight is read."""
    if not Path("whole").exists():
        write("whole", plain())
    for base, tuned in ((folder, "whole"), ("whole", folder)):
        with pytest.raises(FetchError) as told:
            new_manifest(base=base, tuned=tuned)
    with pytest.raises(FetchError) as raised:
        fetch(Reference(path=folder), memo=Path("memo.json"), progress=silent)
    assert str(raised.value) == str(told.value)
    assert "\n" not in str(raised.value)
    assert raised.value.next_step
    return str(raised.value)


# --- quantised weights --------------------------------------------------------------------------------------------


@dataclass
class Stored:
    """How one module is stored, what config.json says of it, and the words in which it is named."""

    named: str
    endings: dict[str, torch.Tensor]
    quantisation: Config | None = field(default=None)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


CODES, SCALES = ones(256, 1, dtype=BYTES), ones(8, dtype=torch.float32)
NF4 = {".weight": CODES, ".weight.absmax": SCALES, ".weight.quant_map": ones(16, dtype=torch.float32)}
LLM_INT8 = {".weight": ones(32, 16, dtype=torch.int8), ".SCB": ones(32, dtype=torch.float32)}
PACKED = {".qweight": ones(2, 32, dtype=WORDS), ".qzeros": ones(1, 4, dtype=WORDS), ".scales": ones(1, 32)}
INT4 = {".weight_packed": ones(32, 2, dtype=WORDS), ".weight_scale": ones(32, 1), ".weight_shape": ones(2, dtype=WORDS)}
FP4 = {".weight": ones(32, 8, dtype=BYTES), ".weight_scale": ones(32, 1, dtype=FP8), ".weight_scale_2": ones()}
FP4_CT = {".weight_packed": ones(32, 8, dtype=BYTES), ".weight_scale": ones(32, 1, dtype=FP8)}
TENSOR_FP8 = {".weight": ones(32, 16, dtype=FP8), ".weight_scale": ones(dtype=torch.float32), ".input_scale": ones()}
ROW_FP8 = {".weight": ones(32, 16, dtype=FP8), ".weight_scale": ones(32, 1)}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "bnb_4bit_quant_type": "fp4"}

STORED = (
    Stored("bitsandbytes (4-bit, nf4)", NF4, BNB4),
    Stored("bitsandbytes (4-bit, fp4)", NF4, {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    Stored("bitsandbytes (4-bit)", NF4, {"quant_method": "BITSANDBYTES"}),
    Stored("bitsandbytes 4-bit", NF4 | {".weight.quant_state.bitsandbytes__nf4": ones(80, dtype=BYTES)}),
    Stored("bitsandbytes (8-bit)", LLM_INT8, BNB8),
    Stored("bitsandbytes 8-bit", LLM_INT8 | {".weight_format": ones(dtype=BYTES)}),
    Stored("GPTQ (4-bit)", PACKED | {".g_idx": ones(16, dtype=WORDS)}, {"quant_method": "gptq", "bits": 4}),
    Stored("GPTQ", PACKED | {".g_idx": ones(16, dtype=WORDS)}),
    Stored("AWQ (4-bit)", PACKED, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    Stored("AWQ", PACKED),
    Stored("AutoRound (3-bit)", PACKED, {"quant_method": "auto-round", "bits": 3}),
    Stored(
        "compressed-tensors (pack-quantized)", INT4, {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    ),
    Stored("compressed-tensors, packed", INT4),
    Stored(
        "compressed-tensors (int-quantized)",
        {".weight": ones(32, 16, dtype=torch.int8), ".weight_scale": ones(32, 1)},
        {"config_groups": {"group_0": {}}, "format": "int-quantized"},
    ),
    Stored("8-bit integers", {".weight": ones(32, 16, dtype=torch.int8), ".weight_scale": ones(32, 1)}),
    Stored("compressed-tensors (float-quantized)", ROW_FP8, {"config_groups": {}, "format": "float-quantized"}),
    Stored("FP8 with one scale for a tensor or a row", ROW_FP8),
    Stored("FP8 with one scale for a tensor or a row", TENSOR_FP8),
    Stored("FP8 with one scale", {".weight": ones(32, 16, dtype=FP8), ".weight_scale_inv": ones(dtype=torch.float32)}),
    Stored("FP8 with one scale", {".weight": ones(32, 16, dtype=FP8), ".weight_scale_inv": ones(1)}),
    Stored("FP8", TENSOR_FP8, {"quant_method": "fp8", "activation_scheme": "static"}),
    Stored("FBGEMM FP8", ROW_FP8, {"quant_method": "fbgemm_fp8"}),
    Stored("FP8 without scales", {".weight": ones(32, 16, dtype=FP8)}),
    Stored("FP8 without scales", {".weight": ones(32, 16, dtype=FP8)}, {"modules_to_not_convert": []}),
    Stored("FP8 as DeepSeek's own", {".weight": ones(32, 16, dtype=FP8), ".scale": ones(1, 1)}),
    Stored("weights packed in U8", {"": ones(4, 32, 16, dtype=BYTES)}),
    Stored("MXFP8", {".weight": ones(32, 64, dtype=FP8), ".weight_scale_inv": ones(32, 2, dtype=BYTES)}),
    Stored("FP8 as ComfyUI has it", {".weight": ones(32, 16, dtype=FP8), ".scale_weight": ones()}),
    Stored("FP8 of Mistral's own format", {".weight": ones(32, 16, dtype=FP8), ".qscale_weight": ones()}),
    Stored("ModelOpt (NVFP4)", FP4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    Stored("ModelOpt (FP8)", TENSOR_FP8, {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}),
    Stored("NVFP4 (ModelOpt)", FP4),
    Stored("NVFP4 (compressed-tensors)", FP4_CT | {".weight_global_scale": ones(1)}),
    Stored("torchao", {"._weight_qdata": ones(32, 8, dtype=BYTES), "._weight_scale": ones(32)}),
    Stored(
        "torchao", {".weight:qdata": ones(32, 8, dtype=BYTES)}, {"quant_method": "torchao", "quant_type": {"d": {}}}
    ),
    Stored(
        "MLX, quantised", {".weight": torch.ones(32, 2, dtype=torch.uint32), ".scales": ones(32), ".biases": ones(32)}
    ),
    Stored("HQQ (4-bit)", {".W_q": ones(32, 8, dtype=BYTES), ".zero": ones(8)}, {"quant_method": "hqq", "nbits": 4}),
    Stored("HQQ", {".W_q": ones(32, 8, dtype=BYTES), ".scale": ones(8), ".zero": ones(8)}),
    Stored("EETQ", {".weight": ones(16, 32, dtype=torch.int8), ".weight_scales": ones(32)}),
    Stored(
        "Quanto (int8)",
        {".weight._data": ones(32, 16, dtype=torch.int8)},
        {"quant_method": "quanto", "weights": "int8"},
    ),
    Stored("Quanto", {".weight._data": ones(32, 16, dtype=torch.int8), ".weight._scale": ones(32, 1)}),
    Stored("AQLM", {".codes": ones(32, 2, 1, dtype=torch.int8), ".codebooks": ones(1, 256, 1, 8)}),
    Stored("VPTQ", {".centroids.weight": ones(1, 256), ".indices": ones(1, 32, dtype=torch.int32)}),
    Stored("EXL2", {".q_weight": ones(2, 32, dtype=WORDS), ".q_scale": ones(1, 4, dtype=WORDS)}),
    Stored("EXL3", {".trellis": ones(1, 2, 32, dtype=torch.int16), ".suh": ones(16), ".svh": ones(32)}),
    Stored("SpQR", {".dense_weights": ones(32, dtype=WORDS)}),
    Stored("QuIP#", {".Qidxs": ones(32, 2, dtype=torch.int16)}),
    Stored("FP-Quant", {".qweight": ones(32, 8, dtype=BYTES), ".dqweight": ones(32, 16)}),
    Stored("Metal", {".weight": ones(32, 2, dtype=WORDS), ".scales": ones(32), ".qbiases": ones(32)}),
    Stored(
        "Quark",
        {".weight": ones(32, 8, dtype=BYTES), ".weight_scale": ones(32, 1, dtype=BYTES)},
        {"quant_method": "quark"},
    ),
    Stored("BitNet", {".weight": ones(8, 16, dtype=BYTES), ".weight_scale": ones(1)}),
    Stored("MXFP4 of shapes", {"_blocks": ones(4, 32, 1, 8, dtype=BYTES), "_scales": ones(4, 32, 1, dtype=BYTES)}),
    Stored("weights packed in F4", {".weight": ones(32, 8, dtype=BYTES).view(torch.float4_e2m1fn_x2)}),
    Stored("weights packed in I32", {".weight": ones(32, 2, dtype=WORDS)}),
    Stored("SINQ", {".W_q": ones(32, 8, dtype=BYTES), ".meta": ones(8)}, {"quant_method": "sinq"}),
    Stored("a method that is not known here, 'nf5-turbo'", NF4, {"quant_method": "nf5-turbo"}),
    Stored("a method that is not known here, 'nf5-turbo'", {".weight": ones(32, 16)}, {"quant_method": "nf5-turbo"}),
)


@pytest.mark.parametrize("stored", STORED, ids=lambda stored: stored.named)
def test_quantised_weights_are_named_with_the_way_on(stored: Stored) -> None:
    config = {"quantization_config": stored.quantisation} if stored.quantisation else {}
    write("packed", packed(stored.endings), config)
    told = refusal("packed")
    assert told.startswith(f"packed is quantised: {stored.named}")
    assert "name the checkpoint before it was quantised" in told


def test_every_weight_format_has_an_example_above() -> None:
    without_config = [stored.named for stored in STORED if stored.quantisation is None]
    lacking = [kind.name for kind in WEIGHT_FORMATS if not any(kind.name.startswith(name) for name in without_config)]
    assert lacking == []


def test_experts_in_mxfp4_beside_plain_ones_of_the_same_name_are_refused() -> None:
    parts = {"_blocks": ones(4, 32, 1, 16, dtype=BYTES), "_scales": ones(4, 32, 1, dtype=BYTES)}
    write("twice", packed(parts | {"": ones(4, 32, 32)}))
    assert "MXFP4 of shapes that gpt-oss does not have" in refusal("twice")


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"quantization_config": BNB4}},
        {"thinker_config": {"text_config": {"quantization_config": BNB4}}},
        {"compression_config": BNB4},
    ],
)
def test_a_quantisation_may_stand_anywhere_in_the_config(config: Config) -> None:
    write("packed", packed(NF4), config)
    assert "bitsandbytes (4-bit, nf4), by" in refusal("packed")


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ (4-bit)"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "AWQ (4-bit)"),
        (
            "hf_quant_config.json",
            {"producer": {}, "quantization": {"quant_algo": "W4A16_AWQ"}},
            "ModelOpt (W4A16_AWQ)",
        ),
        ("quant_strategy.json", {"measurement": {}}, "AWQ, by"),
    ],
)
def test_a_quantisation_may_stand_in_a_file_of_its_own(file: str, content: Config, named: str) -> None:
    (write("packed", packed(PACKED)) / file).write_text(json.dumps(content))
    assert f"is quantised: {named}" in refusal("packed")


def test_the_base_that_the_card_names_is_the_hint() -> None:
    write("packed", packed(NF4), {"_name_or_path": "o/other"}, README__md="---\nbase_model: o/plain\n---\n# Card\n")
    assert "before it was quantised (its card names o/plain)" in refusal("packed")


def test_the_base_that_a_config_names_is_the_hint() -> None:
    write("packed", packed(NF4), {"_name_or_path": "o/plain"})
    assert "before it was quantised (its config names o/plain)" in refusal("packed")


@pytest.mark.parametrize("named", ["../plain", "o/plain; rm -rf /", "\x1b[2Jo/plain", ["", 5], {"o": "plain"}])
def test_what_is_no_name_of_a_repository_is_no_hint(named: object) -> None:
    write("packed", packed(NF4), {"_name_or_path": named}, README__md=f"---\nbase_model: {json.dumps(named)}\n---\n")
    assert "before it was quantised;" in refusal("packed")


def test_a_method_of_a_hostile_name_is_shown_short_and_escaped() -> None:
    write("packed", plain(), {"quantization_config": {"quant_method": "\x1b[31m" + "q" * 5000}})
    told = refusal("packed")
    assert r"'\x1b[31mqqq" in told
    assert len(told) < 1000


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": BNB4},
        {"quantization_config": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        {"quantization_config": None},
        {"quantization_config": {}},
        {"quantization": "none"},
    ],
)
def test_plain_weights_are_read_whatever_a_config_says_of_a_known_method(config: Config) -> None:
    assert read_headers(write("plain", plain(), config)).keys() == plain().keys()


def test_whole_numbers_that_a_class_keeps_are_no_quantisation() -> None:
    buffers = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=BYTES),
        "embeddings.position_ids": torch.arange(4).reshape(1, 4),
        "bn.num_batches_tracked": torch.tensor(7),
        "empty": torch.empty(0, 4),
        "logit_scale": torch.tensor(2.6),
    }
    assert read_headers(write("plain", plain() | buffers)).keys() == (plain() | buffers).keys()


# --- states that are no model's weights ------------------------------------------------------------------------------

LORA = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "config", "named"),
    [
        ({f"{LORA}.base_layer.weight": ones(32, 16), f"{LORA}.lora_A.default.weight": ones(4, 16)}, {}, "not merged"),
        ({f"{LORA}.lora_A.weight": ones(4, 16), f"{LORA}.lora_B.weight": ones(32, 4)}, {}, "not merged"),
        ({f"{Q}.lora_a": ones(16, 4), f"{Q}.lora_b": ones(4, 32)}, {}, "not merged"),
        ({f"{Q}.ia3_l.default": ones(32, 1)}, {}, "not merged"),
        (
            {"score.original_module.weight": ones(2, 16), "score.modules_to_save.default.weight": ones(2, 16)},
            {},
            "merged",
        ),
        ({f"{Q}.weight": torch.empty(0), NORM: torch.empty(0)}, {}, "ZeRO-3"),
        ({"_fsdp_wrapped_module._flat_param": ones(64)}, {}, "flattened parameters of FSDP"),
        ({"tok_embeddings.weight": ones(8, 4), "layers.0.attention.wq.weight": ones(4, 4)}, {}, "Mistral's or Meta's"),
        (
            plain(),
            {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.36.0"},
            "'FluxTransformer2DModel'",
        ),
        (
            plain(),
            {"architecture": "vit_tiny_patch16_224", "num_features": 192, "pretrained_cfg": {}},
            "a model of timm",
        ),
    ],
)
def test_a_state_that_is_no_models_weights_is_named(tensors: Tensors, config: Config, named: str) -> None:
    write("odd", tensors, config)
    assert named in refusal("odd")


# --- folders without a checkpoint ------------------------------------------------------------------------------------

FOLDERS = (
    ("adapter_config.json adapter_model.safetensors README.md", "a PEFT adapter"),
    ("adapter_config.json adapter_model.bin", "a PEFT adapter"),
    ("adapter_model.safetensors checkpoint-5/adapter_config.json", "a PEFT adapter"),
    ("pytorch_lora_weights.safetensors", "a LoRA without its model"),
    ("adapters.safetensors config.json", "a LoRA without its model"),
    (
        "model_index.json transformer/diffusion_pytorch_model.safetensors text_encoder/model.safetensors",
        "a diffusers pipeline",
    ),
    ("config.json diffusion_pytorch_model.safetensors", "a diffusers model"),
    (
        "config.json diffusion_pytorch_model.safetensors.index.json diffusion_pytorch_model-00001-of-00002.safetensors",
        "a diffusers model",
    ),
    ("config.json diffusion_pytorch_model.fp16.safetensors", "a diffusers model"),
    ("transformer/config.json transformer/diffusion_pytorch_model.bin", "a diffusers model"),
    ("consolidated.safetensors params.json tekken.json", "a checkpoint of Mistral's or Meta's own format"),
    ("consolidated-00001-of-00002.safetensors consolidated.safetensors.index.json", "a checkpoint of Mistral's"),
    ("original/consolidated.00.pth config.json", "a checkpoint of Mistral's or Meta's own format"),
    ("model.fp16.safetensors config.json", "a checkpoint that has only a variant"),
    (
        "model.safetensors.index.fp16.json model.fp16-00001-of-00002.safetensors",
        "a checkpoint that has only a variant",
    ),
    ("model-00001-of-00002.fp16.safetensors config.json", "a checkpoint that has only a variant"),
    ("model-00001-of-00002.safetensors model-00002-of-00002.safetensors config.json", "a checkpoint whose shards"),
    ("model-rank-0-part-0.safetensors config.json", "a state of vLLM's"),
    ("open_clip_config.json open_clip_pytorch_model.bin", "OpenCLIP's own format"),
    ("pytorch_model.bin config.json model.onnx optimizer.pt", "only pickled weights"),
    ("pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json", "only pickled weights"),
    ("global_step500/mp_rank_00_model_states.pt latest zero_to_fp32.py trainer_state.json", "DeepSpeed's state"),
    ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt mp_rank_00_model_states.pt", "DeepSpeed's state"),
    ("latest_checkpointed_iteration.txt iter_0000100/mp_rank_00/model_optim_rng.pt", "Megatron's or NeMo's state"),
    ("llama.nemo", "Megatron's or NeMo's state"),
    (".metadata __0_0.distcp __1_0.distcp", "shards of torch.distributed"),
    ("pytorch_model_fsdp_0/.metadata pytorch_model_fsdp_0/__0_0.distcp optimizer_0/__0_0.distcp", "shards of torch"),
    ("weights.00.safetensors config.json", "a checkpoint of MLX"),
    ("weights.npz config.json", "a checkpoint of MLX"),
    ("checkpoint-500/model.safetensors checkpoint-1000/model.safetensors README.md", "other folders"),
    ("modules.json 0_Transformer/model.safetensors 1_Pooling/config.json", "other folders"),
    ("refs/main blobs/0123 snapshots/0123/config.json", "huggingface_hub's cache"),
    ("gptq_model-4bit-128g.safetensors quantize_config.json config.json", "quantised weights under a name"),
    ("llama-2-7b.AWQ.safetensors config.json", "quantised weights under a name"),
    ("v1-5-pruned-emaonly.safetensors config.json", "safetensors under a name"),
    ("model.bin shared_vocabulary.json config.json", "an export for another runtime"),
    ("openvino_model.xml openvino_model.bin", "an export for another runtime"),
    ("rank0.engine config.json", "an export for another runtime"),
    ("model.pth", "pickled files"),
    ("last.ckpt hparams.yaml", "pickled files"),
    ("model-Q4_K_M.gguf README.md", "GGUF"),
    ("ggml-model-q4_0.bin config.json", "GGUF"),
    ("Q8_0/model-00001-of-00002.gguf", "GGUF"),
    ("onnx/model.onnx config.json", "only ONNX"),
    ("model.onnx model.onnx_data config.json", "only ONNX"),
    ("tf_model.h5 config.json", "weights for TensorFlow"),
    ("flax_model.msgpack config.json", "weights for TensorFlow"),
    ("optimizer.pt scheduler.pt rng_state.pth trainer_state.json training_args.bin", "the state of a training"),
    ("optimizer.bin random_states_0.pkl scheduler.bin", "the state of a training run"),
)


@pytest.mark.parametrize(("files", "named"), FOLDERS, ids=[files[:60] for files, _ in FOLDERS])
def test_a_folder_that_is_no_checkpoint_is_named_by_its_files(files: str, named: str) -> None:
    for name in files.split():
        file = Path("odd", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")  # were it ever unpickled
    assert f"odd holds {named}" in refusal("odd")
    assert not Path("ran").exists()


def test_the_card_of_a_folder_that_is_no_checkpoint_gives_the_hint() -> None:
    Path("odd").mkdir()
    Path("odd/model-Q4_K_M.gguf").write_bytes(b"GGUF")
    Path("odd/README.md").write_text("---\nbase_model: [o/plain, o/other]\n---\n")
    assert refusal("odd").endswith("; its card names the base o/plain.")


def test_every_kind_of_folder_has_an_example_above() -> None:
    assert [kind.name for kind in FOLDER_FORMATS if not any(kind.name.startswith(named) for _, named in FOLDERS)] == []


def test_weights_in_place_come_before_all_else_that_lies_beside_them() -> None:
    folder = write("whole", plain(), adapter_config__json="{}", optimizer__pt="", consolidated__safetensors="")
    assert read_headers(folder).keys() == plain().keys()


# --- the page ------------------------------------------------------------------------------------------------------


def rows(heading: str) -> list[tuple[str, str]]:
    part = DOCS.partition(f"### {heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| (.+?) \| (.+?) \|$", part, re.MULTILINE)[2:]


@pytest.mark.parametrize(
    ("heading", "kinds"), [("Folders", FOLDER_FORMATS), ("States", OTHER_FORMATS)], ids=["folders", "states"]
)
def test_the_page_has_each_kind_with_its_next_step(heading: str, kinds: Any) -> None:
    assert rows(heading) == [(kind.name, kind.next_step) for kind in kinds]


def test_the_page_has_each_format_of_weights_and_each_method() -> None:
    names = dict.fromkeys([*(kind.name for kind in WEIGHT_FORMATS), *METHODS.values()])
    part = DOCS.partition("### Quantised weights\n")[2].partition("\n#")[0]
    assert part.partition("Named: ")[2].partition(".\n")[0].replace("\n", " ") == "; ".join(names)
