"""A merged DoRA is no LoRA, and is told from a full fine-tune by the rows that its magnitudes scale."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from publisher.adapters.loading import quiet
from publisher.errors import ExtractionError
from publisher.numerics.row_scaling import is_row_scaled
from tests.inputs.pairs import Pair, Weights
from tests.models import small_llama

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4}


def weight(rows: int, columns: int, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (0.02 * torch.randn(rows, columns)).to(dtype)


def plus_low_rank(base: Tensor, *, share: float = 0.1) -> Tensor:
    """The base with a rank-4 update of this share of its norm, float32."""
    update = torch.randn(base.shape[0], 4) @ torch.randn(4, base.shape[1])
    return base.float() + share * update * float(base.float().norm() / update.norm())


def dora(base: Tensor, *, spread: float, dim: int = 1) -> Tensor:
    """The base with a low rank, whose rows (dim 1) or columns then have the base's lengths, changed by `spread`."""
    merged, magnitude = plus_low_rank(base), base.float().norm(dim=dim, keepdim=True)
    magnitude *= 1 + spread * torch.randn_like(magnitude)
    scaled: Tensor = magnitude * merged / merged.norm(dim=dim, keepdim=True)
    return scaled.to(base.dtype)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("shape", [(32, 32), (48, 32), (64, 256), (256, 64), (600, 40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [0, 1])
def test_scaled_rows_or_columns_are_seen(shape: tuple[int, int], dtype: torch.dtype, dim: int) -> None:
    base = weight(*shape, dtype=dtype)
    assert is_row_scaled("x", base=base, tuned=dora(base, spread=0.03, dim=dim))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_no_dora_is_not_called_one(dtype: torch.dtype) -> None:
    base = weight(96, 64, dtype=dtype)
    for tuned in (
        plus_low_rank(base),
        plus_low_rank(base, share=1.0),
        base.float() + 0.1 * weight(96, 64),
        plus_low_rank(base) + 0.02 * weight(96, 64),
        weight(96, 64),
    ):
        assert not is_row_scaled("x", base=base, tuned=tuned.to(dtype))


def test_rows_of_zeros_do_no_harm() -> None:
    base = weight(64, 64)
    base[:5] = 0
    tuned = dora(base, spread=0.03)
    tuned[:5] = 0
    assert is_row_scaled("x", base=base, tuned=tuned)


@pytest.fixture
def merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A Llama and its fine-tune by PEFT's DoRA on q and v, merged in float32."""
    monkeypatch.chdir(tmp_path)
    pair = Pair(tmp_path, "LlamaForCausalLM")
    model = small_llama(SIZES, seed=3)
    with quiet():
        model.save_pretrained(pair.base)
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_dora=True)
        adapted: Any = peft.get_peft_model(model.float(), settings)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_A" in name or "lora_B" in name:
                    parameter.normal_(std=0.02)
                if "magnitude" in name:
                    parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
        adapted.merge_and_unload().bfloat16().save_pretrained(pair.source)
    return pair


def test_a_merged_dora_is_named(merged: Pair) -> None:
    with pytest.raises(ExtractionError, match="a merged DoRA, whose magnitudes no LoRA can hold") as raised:
        merged.extracted()
    assert "use_dora" in raised.value.next_step


def test_a_full_fine_tune_is_not_called_a_dora(merged: Pair) -> None:
    def train_all(weights: Weights) -> None:
        for name in weights:
            if "q_proj" in name or "v_proj" in name:
                weights[name] = (weights[name].float() + 0.01 * torch.randn(weights[name].shape)).bfloat16()

    merged.change(train_all)
    with pytest.raises(ExtractionError, match="a full fine-tune, or a source trained from another base"):
        merged.extracted()
