"""The FP8 base in bfloat16: held against a direct reference bit for bit, and against transformers for the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from publisher.adapters.loading import quiet
from publisher.checkpoints import fp8
from publisher.cli.demo.fp8 import write_fp8
from publisher.errors import FetchError
from publisher.records.checkpoint import Checkpoint, Snapshot
from publisher.verification import fp8_emulation as fp8base
from tests.models import small_llama

SIZES = {"vocab_size": 64, "hidden_size": 200, "intermediate_size": 300, "num_hidden_layers": 2, "head_dim": 50}


def snapshot(folder: Path) -> Snapshot:
    checkpoint = Checkpoint(kind="local", name=folder.name, revision="0" * 64, files=())
    return Snapshot(checkpoint=checkpoint, folder=folder)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A small Llama whose sizes are no multiples of 128."""
    return saved(tmp_path / "base", **SIZES)


def saved(folder: Path, **sizes: int) -> Path:
    with quiet():
        small_llama(sizes | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, seed=5).save_pretrained(folder)
    return folder


def loaded(folder: Path, **how: Any) -> Any:
    with quiet():
        return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how).eval()


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def by_hand(values: torch.Tensor, group: int) -> torch.Tensor:
    """Each token and group for itself: amax / 448, to the nearest of all FP8 values, ties to the even code, back."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    out = torch.zeros_like(values, dtype=torch.bfloat16)
    for token, row in enumerate(values.float()):
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = part.abs().amax() / 448
            if scale == 0:
                continue
            away = ((part / scale).abs().double()[:, None] - codes).abs()
            nearest = [min(range(127), key=lambda code: (line[code].item(), code % 2)) for line in away]
            whole = codes[nearest].float() * part.sign()
            out[token, start : start + group] = (whole * scale).bfloat16()
    return out


# --- activations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [128, 200, 300, 7])
def test_activations_are_those_rounded_by_hand_bit_for_bit(channels: int) -> None:
    values = (3 * torch.randn(5, channels, generator=torch.Generator().manual_seed(1))).bfloat16()
    values[2] = 0
    values[3, 0] = 1e4
    assert torch.equal(fp8base.requantised(values, 128), by_hand(values, 128))


def test_the_shape_is_kept_and_tokens_do_not_touch_each_other() -> None:
    values = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(2)).bfloat16()
    together = fp8base.requantised(values, 128)
    assert together.shape == values.shape
    assert torch.equal(together[1, 2], fp8base.requantised(values[1, 2], 128))


def test_halfway_values_go_to_the_even_code() -> None:
    values = torch.tensor([[448.0, 17.0, 19.0, -17.0]])  # the step from 16 to 32 is 2
    assert fp8base.requantised(values, 4).tolist() == [[448.0, 16.0, 20.0, -16.0]]


Values = st.floats(-(2**60), 2**60, width=32).filter(lambda value: value == 0 or abs(value) > 2**-60)


@given(st.lists(Values, min_size=1, max_size=12))
def test_no_value_overflows_or_leaves_half_a_step(values: list[float]) -> None:
    given_values = torch.tensor([values])
    found, largest = fp8base.requantised(given_values, 4).float(), given_values.abs().max()
    assert bool(found.isfinite().all())
    assert bool(((found - given_values).abs() <= given_values.abs() / 14 + largest / 448 / 2**9).all())


# --- the model ----------------------------------------------------------------------------------------------


def test_every_converted_linear_computes_what_the_direct_reference_does(base: Path, tmp_path: Path) -> None:
    count = write_fp8(base, tmp_path / "fp8")
    plain, model = loaded(base), loaded(base)
    assert fp8base.emulate(model, snapshot(tmp_path / "fp8")) == count == 14
    for name, linear in model.named_modules():
        if not name.endswith("proj"):
            continue
        inputs = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(3)).bfloat16()
        codes, scale = fp8.quantise(plain.get_submodule(name).weight, (128, 128))
        tall = scale.repeat_interleave(128, 0)[: linear.out_features].repeat_interleave(128, 1)[:, : linear.in_features]
        weight = (codes.float() * tall).bfloat16()
        assert torch.equal(linear(inputs), functional.linear(by_hand(inputs, 128), weight)), name


def test_the_weights_are_those_that_transformers_dequantises(tmp_path: Path) -> None:
    # In multiples of 128: for others, transformers 5.24 takes the rows by scales for the height of a block.
    whole = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    base = saved(tmp_path / "base", **SIZES | whole)
    write_fp8(base, tmp_path / "fp8")
    model = loaded(base)
    fp8base.emulate(model, snapshot(tmp_path / "fp8"))
    how = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = loaded(tmp_path / "fp8", quantization_config=how).state_dict()
    found = model.state_dict()
    assert found.keys() == theirs.keys()
    assert [name for name in found if not torch.equal(found[name], theirs[name])] == []


def test_modules_that_the_checkpoint_leaves_alone_are_left_alone(base: Path, tmp_path: Path) -> None:
    kept = ("lm_head", "model.layers.1", "o_proj")
    assert write_fp8(base, tmp_path / "fp8", kept=kept) == 6
    plain, model = loaded(base), loaded(base)
    fp8base.emulate(model, snapshot(tmp_path / "fp8"))
    inputs = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "lm_head"):
        assert torch.equal(model.get_submodule(name)(inputs), plain.get_submodule(name)(inputs)), name


def test_the_adapter_takes_its_input_unquantised(base: Path, tmp_path: Path) -> None:
    import peft

    write_fp8(base, tmp_path / "fp8")
    model = loaded(base)
    fp8base.emulate(model, snapshot(tmp_path / "fp8"))
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj"], init_lora_weights=False)
    layer = peft.get_peft_model(model, config).get_base_model().get_submodule("model.layers.0.self_attn.q_proj")
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    inputs = torch.randn(3, 200, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight = layer.base_layer.weight
    branch = functional.linear(functional.linear(inputs.to(a.dtype), a), b)
    expected = functional.linear(by_hand(inputs, 128), weight) + branch
    assert torch.equal(layer(inputs), expected.to(layer(inputs).dtype))


def test_a_demo_base_in_fp8_answers_nearly_as_in_bfloat16(demo_pairs: Path, tmp_path: Path) -> None:
    count = write_fp8(demo_pairs / "clef-flash-base", tmp_path / "fp8")
    ids = torch.arange(20, 52)[None]
    with quiet(), torch.no_grad():
        loading = transformers.Qwen3_5ForConditionalGeneration.from_pretrained
        model = loading(demo_pairs / "clef-flash-base", dtype=torch.bfloat16).eval()
        before = model(input_ids=ids).logits.float()
        assert fp8base.emulate(model, snapshot(tmp_path / "fp8")) == count == 248
        after = model(input_ids=ids).logits.float()
    assert 0 < (after - before).norm() / before.norm() < 0.5


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_scheme": "static"}, "activation_scheme in config.json is 'static'. Expected 'dynamic'"),
        ({"quant_method": "fbgemm_fp8"}, "quant_method in config.json is 'fbgemm_fp8'. Expected 'fp8'"),
        ({"modules_to_not_convert": ["o_proj"]}, "keeps out of it: model.layers.0.self_attn.o_proj, model"),
    ],
)
def test_another_scheme_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_fp8(base, tmp_path / "fp8")
    edit(tmp_path / "fp8", **change)
    with pytest.raises(FetchError) as refusal:
        fp8base.emulate(loaded(base), snapshot(tmp_path / "fp8"))
    assert message in str(refusal.value)


def test_a_checkpoint_without_fp8_is_refused(base: Path, tmp_path: Path) -> None:
    write_fp8(base, tmp_path / "fp8", kept=("proj",))
    with pytest.raises(FetchError, match="no FP8 weights"):
        fp8base.emulate(loaded(base), snapshot(tmp_path / "fp8"))


def test_the_fp8_release_of_another_base_is_refused_by_its_tensors(base: Path, tmp_path: Path) -> None:
    write_fp8(base, tmp_path / "fp8")
    other = small_llama(SIZES | {"num_hidden_layers": 3, "intermediate_size": 310}, seed=5)
    with pytest.raises(FetchError) as refusal:
        fp8base.emulate(other, snapshot(tmp_path / "fp8"))
    assert "model.layers.2.mlp.up_proj.weight is in the base alone" in refusal.value.found
    assert "model.layers.0.mlp.up_proj.weight is (300, 200), in the base (310, 200)" in refusal.value.found
