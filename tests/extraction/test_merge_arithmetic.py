"""How a release was merged is found in its weights: in which dtypes, and with how many roundings."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from publisher.adapters.peft_files import Factors
from publisher.extraction.module import extract_module
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.intervals import intervals, merged
from publisher.records.extraction import MergeArithmetic

NAME = "model.layers.3.mlp.up_proj.weight"
RANK = 8
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# dtype of the base's file, in which it was loaded and merged, to which the sum was rounded, and of the release's file
WAYS = {
    "base cast to bf16, merged there": (FP32, BF16, BF16, BF16),
    "base cast to fp16, merged there": (FP32, FP16, FP16, FP16),
    "all in float32, then bf16": (FP32, FP32, BF16, BF16),
    "all in float32, then fp16": (FP32, FP32, FP16, FP16),
    "all in float32, then bf16, stored in float32": (FP32, FP32, BF16, FP32),
    "base cast to bf16, result stored in float32": (FP32, BF16, BF16, FP32),
    "all in bf16, result stored in float32": (BF16, BF16, BF16, FP32),
    "all in bf16, result stored in fp16": (BF16, BF16, BF16, FP16),
    "base in fp16 cast to bf16": (FP16, BF16, BF16, BF16),
    "base in fp16 merged in float32, then bf16": (FP16, FP32, BF16, BF16),
    "base in fp16 merged there, then bf16": (FP16, FP16, BF16, BF16),
    "base cast to fp16, merged there, then bf16": (FP32, FP16, BF16, BF16),
}
Method = Literal["svd", "exact"]


def _weights(way: str, *, rms: float, shape: tuple[int, int] = (192, 160)) -> tuple[Tensor, Tensor]:
    """Base and release as their files have them, with an update of rank 8."""
    stored_base, merged_in, rounded_to, stored = WAYS[way]
    generator = torch.Generator().manual_seed(7)
    base = (0.02 * torch.randn(shape, generator=generator)).to(stored_base)
    left, right = (torch.randn(size, generator=generator) for size in ((shape[0], RANK), (RANK, shape[1])))
    update = left @ right * (rms / math.sqrt(RANK))
    return base, (base.to(merged_in).float() + update).to(merged_in).to(rounded_to).to(stored)


def _extracted(
    base: Tensor, source: Tensor, *, method: Method = "svd", rank: int | Literal["auto"] = "auto"
) -> Factors:
    settings = AdapterSettings(
        method=method, rank=rank, dtype="float32", layout="pattern", task_type="FEATURE_EXTRACTION"
    )
    return extract_module(NAME, base=base, tuned=source, settings=settings)


@pytest.mark.parametrize("rms", [5e-4, 3e-3, 3e-2])
@pytest.mark.parametrize("way", WAYS)
def test_the_dtypes_of_the_merge_are_found_and_rank_and_floor_are_those_of_that_merge(way: str, rms: float) -> None:
    _, merged_in, rounded_to, stored = WAYS[way]
    figures = _extracted(*_weights(way, rms=rms)).figures
    names = [str(dtype).removeprefix("torch.") for dtype in (merged_in, rounded_to)]
    unusual = MergeArithmetic.model_validate({"merged_in": names[0], "rounded_to": names[1]})
    assert figures.arithmetic == (None if merged_in == rounded_to == stored else unusual)
    assert figures.rank == RANK
    assert figures.ratio == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("way", WAYS)
def test_exact_factors_restore_the_release_by_the_arithmetic_found(way: str) -> None:
    base, source = _weights(way, rms=2e-3)
    _, merged_in, rounded_to, _ = WAYS[way]
    module = _extracted(base, source, method="exact")
    back = (base.to(merged_in).float() + module.b @ module.a).to(merged_in).to(rounded_to)
    share = float((back == source.to(rounded_to)).double().mean())
    assert module.figures.exact_share == pytest.approx(share, abs=1e-5)
    assert share > 0.999


def test_an_update_below_the_step_is_told_apart_too() -> None:
    assert _extracted(*_weights("all in float32, then bf16", rms=5e-6)).figures.arithmetic is not None
    assert _extracted(*_weights("base cast to bf16, merged there", rms=5e-6), rank=RANK).figures.arithmetic is None


@pytest.mark.parametrize("rms", [1e-2, 4e-2])
def test_two_roundings_show_in_what_a_fit_leaves_and_floor_and_edge_are_theirs(rms: float) -> None:
    base, _ = _weights("all in bf16, result stored in fp16", rms=rms)
    _, update = (tensor.float() for tensor in _weights("all in float32, then fp16", rms=rms))
    update = update - base.float()
    u, s, v = torch.linalg.svd(update, full_matrices=False)
    update = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
    source = merged(base=base, product=update, dtype=BF16, arithmetic="update rounded first")
    figures = _extracted(base, source).figures
    assert figures.arithmetic is not None
    assert figures.arithmetic.roundings == "update rounded first"
    assert figures.rank == RANK
    assert figures.ratio == pytest.approx(1, abs=0.1)
    once = _extracted(base, merged(base=base, product=update, dtype=BF16)).figures
    assert once.arithmetic is None
    assert once.ratio == pytest.approx(1, abs=0.1)


def test_a_rank_that_is_too_small_is_not_taken_for_a_second_rounding() -> None:
    base, source = _weights("base in fp16 cast to bf16", rms=4e-2)
    assert _extracted(base, source, rank=RANK // 2).figures.arithmetic is None


def test_intervals_know_of_a_rounding_in_float16_before_that_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(3)
    base = (0.02 * torch.randn(256, 256, generator=generator)).half()
    base[:2] = base[:2] * 1e-5
    update = 0.01 * torch.randn(256, 256, generator=generator)
    update[0] = 0
    update[1] *= 1e-5
    goal = intervals(base=base, tuned=merged(base=base, product=update, dtype=BF16), arithmetic="one rounding")
    assert bool(((update - goal.centre).abs() <= goal.half * (1 + 2.0**-10)).all())
    outside = goal.centre + 1.01 * goal.half
    back = merged(base=base, product=outside, dtype=BF16)
    source = merged(base=base, product=update, dtype=BF16)
    assert float((back != source)[2:].double().mean()) > 0.99
