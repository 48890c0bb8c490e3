"""Pairs whose base is in another dtype than the release: rank, floor and shares are those of the merge that was."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from publisher.adapters.merged_checkpoint import open_inputs, write_merged
from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.records.progress import silent
from tests.inputs.pairs import RANK, Pair, Weights

MakePair = Callable[..., Pair]
ATTENTION = r"self_attn\.[qkvo]_proj"


def _as_merged(pair: Pair, *, base: torch.dtype, merged_in: torch.dtype, stored: torch.dtype, scale: float) -> None:
    """Give the base other digits in that dtype, and make the release of it: merged in one dtype, stored in another."""

    def longer(weights: Weights) -> None:
        torch.manual_seed(3)
        for name in sorted(weights):
            weights[name] = (weights[name].float() * (1 + 2e-3 * torch.randn(weights[name].shape))).to(base)

    bases: Weights = {}
    pair.change(longer, side="base")
    pair.change(bases.update, side="base")

    def merge(weights: Weights) -> None:
        torch.manual_seed(4)
        for name in sorted(weights):
            weight = bases[name].to(merged_in)
            if "self_attn" in name:
                rows, columns = weight.shape
                update = scale * torch.randn(rows, RANK) @ torch.randn(RANK, columns)
                weight = (weight.float() + update).to(merged_in)
            weights[name] = weight.to(stored)

    pair.change(merge)


@pytest.mark.parametrize("scale", [1e-4, 2e-2])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["svd", "exact"])
def test_a_float32_base_merged_in_float32_gives_the_rank_that_was_trained(
    make_pair: MakePair, stored: torch.dtype, scale: float, method: Literal["svd", "exact"]
) -> None:
    pair = make_pair("Llama", ATTENTION, hidden_size=96)
    _as_merged(pair, base=torch.float32, merged_in=torch.float32, stored=stored, scale=scale)
    extraction = pair.extracted(method=method, dtype="float32")
    summary = extraction.summary
    assert (summary.linears, [(count.rank, count.modules) for count in summary.ranks]) == (8, [(RANK, 8)])
    assert summary.ratio is not None
    assert 0.9 < summary.ratio.min < summary.ratio.max < 1.1
    (way,) = summary.merge_arithmetic
    assert (way.merged_in, way.rounded_to, way.modules) == ("float32", str(stored).removeprefix("torch."), 8)
    assert summary.exact_share > (0.999 if method == "exact" else 0.7)
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < (0.01 if method == "exact" else 0.3)


def test_the_cast_of_what_publish_merge_writes_is_the_release_in_every_bit(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION, hidden_size=96)
    _as_merged(pair, base=torch.float32, merged_in=torch.float32, stored=torch.bfloat16, scale=0.01)
    extraction = pair.extracted(method="exact", dtype="float32", residual=True)
    base = fetch(Reference(path="base"), memo=Path("memo.json"), progress=silent)
    with open_inputs(extraction, base, staged=pair.staged) as inputs:
        write_merged(inputs, base, out=Path("merged"), again_fp8=False, progress=silent)
    merged, source = (load_file(Path(folder) / "model.safetensors") for folder in ("merged", "source"))
    assert {tensor.dtype for tensor in merged.values()} == {torch.float32}
    assert all(torch.equal(merged[name].bfloat16(), source[name]) for name in source)


def test_a_base_that_was_cast_first_is_the_usual_merge_and_says_nothing(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION, hidden_size=96)
    _as_merged(pair, base=torch.float32, merged_in=torch.bfloat16, stored=torch.bfloat16, scale=0.01)
    extraction = pair.extracted(method="exact", dtype="float32")
    assert (extraction.summary.linears, extraction.summary.rank, extraction.summary.exact_share > 0.999) == (8, 2, True)
    assert all(module.arithmetic is None for module in extraction.modules)
    assert "merge_arithmetic" not in extraction.to_json()


def test_a_release_merged_in_fp16_and_stored_in_bf16_is_rounded_in_both(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION, hidden_size=96)
    _as_merged(pair, base=torch.float32, merged_in=torch.float16, stored=torch.bfloat16, scale=0.01)
    assert pair.extracted(dtype="float32").summary.rank == RANK
    extraction = pair.extracted(method="exact", dtype="float32", rank=RANK)
    assert extraction.summary.linears == 8
    (way,) = extraction.summary.merge_arithmetic
    assert (way.merged_in, way.rounded_to, way.modules) == ("float16", "bfloat16", 8)
    assert extraction.summary.exact_share > 0.999
    pair.validated(extraction)


def test_a_release_merged_in_bf16_and_stored_in_float32_differs_only_where_it_was_trained(make_pair: MakePair) -> None:
    pair = make_pair("Llama", ATTENTION, hidden_size=96)
    _as_merged(pair, base=torch.float32, merged_in=torch.bfloat16, stored=torch.float32, scale=0.01)
    extraction = pair.extracted(dtype="float32")
    assert (extraction.summary.linears, extraction.summary.rank) == (8, RANK)
    (way,) = extraction.summary.merge_arithmetic
    assert (way.merged_in, way.rounded_to, way.modules) == ("bfloat16", "bfloat16", 8)
    pair.validated(extraction)
