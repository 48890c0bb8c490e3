"""publish merge: PEFT's merge as a checkpoint, the release's bytes where recovery was exact, whole or not there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from publisher.adapters.loading import quiet
from publisher.checkpoints import fp8
from publisher.cli import app as cli
from publisher.errors import ManifestError, MergeError, NoRoomError
from publisher.pipeline.merge import Request, merge
from publisher.pipeline.run import Run, run
from publisher.records.merged import Merged
from publisher.records.progress import silent
from tests.inputs.pairs import FP8_BLOCK, quantise, say_fp8
from tests.manifests import ADAPTER, one_variant

ROOT = Path(__file__).parents[2]
FLASH = Path("demo/clef-flash-base")
CARD = {"title": "Pico", "summary": "One adapter."}
PEAK = """
import re, sys
from pathlib import Path
from publisher.cli.app import cli
cli(sys.argv[1:], standalone_mode=False)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def merged_demo(**options: Any) -> Merged:
    return merge(Request(Path("demo.yaml"), Path("dist"), "clef-flash/", Path("merged"), **options), silent)


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def model(name: str, folder: Path, **options: Any) -> Any:
    with quiet():
        found = getattr(transformers, name).from_pretrained(folder, local_files_only=True, **options)
    return found.eval()


@pytest.fixture
def pico(pico_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a copy of one pico pair in ./base and ./one to change."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "one"):
        shutil.copytree(pico_pairs / name, name)
    return tmp_path


def extracted(*, model_class: str = "LlamaForCausalLM", **adapter: Any) -> None:
    """Run extraction and card on ./base and ./one."""
    fields = {"adapter": {**ADAPTER, **adapter}, "model_class": model_class}
    text = one_variant("o/pico", label="Pico", source="one", base="base", card=CARD, **fields)
    Path("pico.yaml").write_text(text, encoding="utf-8")
    run(Run(Path("pico.yaml"), Path("dist"), device="cpu", last="extract"), silent)


def merged_pico(**options: Any) -> Merged:
    return merge(Request(Path("pico.yaml"), Path("dist"), None, Path("merged"), **options), silent)


# --- what comes out -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_small_run")
def test_the_logits_are_those_of_pefts_merge_and_every_other_tensor_is_the_bases() -> None:
    done = merged_demo()
    name = "Qwen3_5ForConditionalGeneration"
    theirs = peft.PeftModel.from_pretrained(model(name, FLASH, dtype=torch.bfloat16), "dist/demo/clef-flash")
    theirs, ours = theirs.merge_and_unload(), model(name, Path("merged"), dtype=torch.bfloat16)
    ids = torch.randint(200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    found, base = tensors(Path("merged")), tensors(FLASH)
    assert found.keys() == base.keys()
    assert sum(not torch.equal(found[key], base[key]) for key in base) == done.linears
    for file in ("config.json", "model.safetensors.index.json", "generation_config.json"):
        assert Path("merged", file).read_bytes() == (FLASH / file).read_bytes()
    assert {p.name for p in Path("merged").iterdir()} == {p.name for p in FLASH.iterdir()}
    assert (done.released, done.left_out) == (False, ())
    assert done.share is not None
    assert 0.5 < done.share < 1


@pytest.mark.long
@pytest.mark.usefixtures("own_small_run")
def test_it_takes_less_than_a_gibibyte() -> None:
    line = ["merge", "--manifest", "demo.yaml", "--variant", "/", "--out", "merged"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *line], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1 << 20
    assert "31 linears merged" in done.stdout


@pytest.mark.usefixtures("pico")
def test_with_an_exact_recovery_the_files_are_the_released_ones_byte_for_byte() -> None:
    extracted(method="exact", rank=6, residual=True)
    done = merged_pico()
    assert (done.released, done.share) == (True, 1.0)
    assert Path("merged/model.safetensors").read_bytes() == Path("one/model.safetensors").read_bytes()


@pytest.mark.usefixtures("pico")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_bases_dtype_is_kept(dtype: torch.dtype) -> None:
    for side in ("base", "one"):
        file = Path(side, "model.safetensors")
        save_file({key: t.to(dtype) for key, t in load_file(file).items()}, file, metadata={"format": "pt"})
    extracted(rank=6)
    done = merged_pico()
    found, source = tensors(Path("merged")), tensors(Path("one"))
    assert (done.share is None) == (dtype == torch.float32)
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert all(torch.allclose(found[key].float(), source[key].float(), atol=2e-3) for key in source)


@pytest.mark.usefixtures("pico")
def test_what_the_adapter_holds_whole_is_replaced_and_what_was_left_out_is_named() -> None:
    file = Path("one/model.safetensors")
    weights = load_file(file)
    changed = {"model.norm.weight": 2 * weights["model.norm.weight"]}
    changed["model.layers.0.input_layernorm.weight"] = 3 * weights["model.layers.0.input_layernorm.weight"]
    save_file(weights | changed, file, metadata={"format": "pt"})
    extracted(carry=["model.norm.weight"], ignore=["*.input_layernorm.weight"])
    done = merged_pico()
    found, base = tensors(Path("merged")), tensors(Path("base"))
    assert torch.equal(found["model.norm.weight"], changed["model.norm.weight"])
    assert torch.equal(found["model.layers.0.input_layernorm.weight"], base["model.layers.0.input_layernorm.weight"])
    assert (done.carried, done.left_out) == (1, ("model.layers.0.input_layernorm.weight",))


def test_weights_stored_transposed_are_merged_as_they_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(4)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    )
    base = transformers.GPT2LMHeadModel(config)
    base.save_pretrained("base")
    tuned = peft.get_peft_model(
        base,
        peft.LoraConfig(r=2, lora_alpha=0.1, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True),
    )
    tuned.merge_and_unload().save_pretrained("one")
    extracted(model_class="GPT2LMHeadModel", rank=2)
    merged_pico()
    found, source = tensors(Path("merged")), tensors(Path("one"))
    assert all(torch.allclose(found[key], source[key], atol=1e-5) for key in source)


# --- FP8 ----------------------------------------------------------------------------------------------------


def fp8_base(scales: torch.dtype) -> dict[str, Tensor]:
    """Put the linears of ./base in FP8; what it held before."""
    file = Path("base/model.safetensors")
    weights = load_file(file)
    stored = dict(weights)
    quantise(stored, r"(q|o|gate|up|down)_proj")
    stored = {key: t.to(scales) if key.endswith("_scale_inv") else t for key, t in stored.items()}
    save_file(stored, file, metadata={"format": "pt"})
    say_fp8(Path("base/config.json"))
    return stored


@pytest.mark.usefixtures("pico")
def test_an_fp8_base_becomes_bf16_and_its_config_says_nothing_of_fp8() -> None:
    stored = fp8_base(torch.float32)
    extracted(rank=6)
    merged_pico()
    found = tensors(Path("merged"))
    assert found.keys() == {key for key in stored if not key.endswith("_scale_inv")}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads(Path("merged/config.json").read_text())
    theirs = peft.PeftModel.from_pretrained(_dequantised(stored), "dist/pico").merge_and_unload().state_dict()
    assert all(torch.equal(found[key], theirs[key]) for key in found)


def _dequantised(stored: dict[str, Tensor]) -> Any:
    """A model in bf16 with the weights of the FP8 base."""
    block = (FP8_BLOCK, FP8_BLOCK)
    plain = {
        key: fp8.dequantise(t, stored[f"{key}_scale_inv"], block) if f"{key}_scale_inv" in stored else t
        for key, t in stored.items()
        if not key.endswith("_scale_inv")
    }
    shutil.copytree("base", "plain")
    config = json.loads(Path("plain/config.json").read_text())
    del config["quantization_config"]
    Path("plain/config.json").write_text(json.dumps(config))
    save_file(plain, "plain/model.safetensors", metadata={"format": "pt"})
    return model("LlamaForCausalLM", Path("plain"), dtype=torch.bfloat16)


@pytest.mark.usefixtures("pico")
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
def test_on_request_it_is_quantised_again_block_by_block(scales: torch.dtype) -> None:
    stored = fp8_base(scales)
    extracted(rank=6)
    merged_pico()
    plain = tensors(Path("merged"))
    shutil.rmtree("merged")
    done = merged_pico(fp8=True)
    found = tensors(Path("merged"))
    assert {key: t.dtype for key, t in found.items()} == {key: t.dtype for key, t in stored.items()}
    assert Path("merged/config.json").read_bytes() == Path("base/config.json").read_bytes()
    for name in (key.removesuffix("_scale_inv") for key in stored if key.endswith("_scale_inv")):
        codes, scale = fp8.quantise(plain[name], (FP8_BLOCK, FP8_BLOCK), scales=scales)
        assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(found[f"{name}_scale_inv"], scale)
        values = fp8.dequantise(found[name], found[f"{name}_scale_inv"], (FP8_BLOCK, FP8_BLOCK))
        assert (values.float() - plain[name].float()).norm() < 0.05 * plain[name].float().norm()
    assert (done.released, done.share) == (False, None)


@pytest.mark.usefixtures("pico")
def test_fp8_of_a_base_that_has_none_is_refused() -> None:
    extracted(rank=6)
    with pytest.raises(MergeError, match="is not in FP8 with block scales"):
        merged_pico(fp8=True)
    assert not Path("merged").exists()


# --- whole or not at all ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("own_small_run")
def test_a_folder_that_holds_something_is_refused_and_an_empty_one_taken() -> None:
    Path("merged").mkdir()
    kept = Path("merged/notes.txt")
    kept.write_text("mine")
    with pytest.raises(MergeError, match="merged is there already, and what it holds is not touched"):
        merged_demo()
    assert kept.read_text() == "mine"
    kept.unlink()
    merged_demo()
    assert Path("merged/config.json").is_file()


@pytest.mark.usefixtures("own_small_run")
def test_what_is_interrupted_leaves_nothing_and_what_was_killed_is_cleared_away() -> None:
    def stop(what: str, done: int = 0, total: int = 0) -> None:
        if done == 20 and total:
            raise KeyboardInterrupt(what)

    before = {path.name for path in Path().iterdir()}
    with pytest.raises(KeyboardInterrupt):
        merge(Request(Path("demo.yaml"), Path("dist"), "clef-flash/", Path("merged")), stop)
    assert {path.name for path in Path().iterdir()} == before
    left = Path(".merged.partial/checkpoint/model-00001-of-00002.safetensors")
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    merged_demo()
    assert {path.name for path in Path().iterdir()} == before | {"merged"}


@pytest.mark.usefixtures("own_small_run")
def test_a_disk_that_is_too_small_is_seen_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(NoRoomError, match=r"has no room for merged \(seen beforehand\)"):
        merged_demo()
    assert not list(Path().glob("*merged*"))


@pytest.mark.usefixtures("own_small_run")
def test_an_adapter_other_than_the_recorded_one_is_refused() -> None:
    path = Path("dist/demo/clef-flash/adapter_model.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(MergeError, match=r"is not the file that extraction\.json records"):
        merged_demo()


@pytest.mark.usefixtures("pico")
def test_a_base_that_changed_since_is_refused() -> None:
    extracted(rank=6)
    shutil.copy("one/model.safetensors", "base/model.safetensors")
    with pytest.raises(MergeError, match=r"the base is base@\w+, and the adapter was made for base@"):
        merged_pico()


@pytest.mark.usefixtures("own_small_run")
def test_of_several_variants_one_has_to_be_named() -> None:
    for path, complaint in ((None, "several variants"), ("other", "no variant at other/")):
        with pytest.raises(ManifestError, match=complaint) as error:
            merge(Request(Path("demo.yaml"), Path("dist"), path, Path("merged")), silent)
        assert "/, clef-flash/" in error.value.expected


@pytest.mark.usefixtures("own_small_run")
def test_the_command_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["merge", "-m", "demo.yaml", "--variant", "clef-flash", "--out", "merged", "--json"]
    cli.cli(line, standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert (found["linears"], found["shards"], found["folder"]) == (31, 3, "merged")
