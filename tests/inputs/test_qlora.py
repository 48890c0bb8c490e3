"""A QLoRA merged into its dequantised base: the quantisation is found, and the adapter taken out against that base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from publisher.adapters.loading import quiet
from publisher.adapters.merged_checkpoint import open_inputs, write_merged
from publisher.adapters.quantised_model import set_quantised
from publisher.checkpoints import nf4
from publisher.errors import ValidationError
from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.records.checkpoint import QuantisedBase
from publisher.records.progress import silent
from tests.inputs.pairs import RANK, Pair, Weights

MakePair = Callable[..., Pair]
EVERY, SOME = r"_proj", r"q_proj|v_proj"
LINEARS = 14


def _by_hand(weight: Tensor, *, double: bool) -> Tensor:
    """Quantise and dequantise block by block, to the nearest of all values, as the paper says it."""
    code = torch.tensor(nf4.NF4)
    blocks = weight.float().reshape(-1, 64)
    magnitudes = blocks.abs().amax(dim=1)
    nearest = code[((blocks / magnitudes[:, None])[..., None] - code).abs().argmin(dim=2)]
    if double:
        offset, eight = magnitudes.mean(), torch.tensor(nf4.dynamic_map())
        for group in torch.split(magnitudes, 256):  # views
            rest = group - offset
            scale = rest.abs().max()
            group.copy_(eight[(rest[:, None] / scale - eight).abs().argmin(dim=1)] * scale + offset)
    return (nearest * magnitudes[:, None]).reshape(weight.shape).to(weight.dtype)


def _trained(pair: Pair, *, double: bool = True, adapted: str = SOME, scale: float = 0.005) -> None:
    """Make the source what a QLoRA leaves: every linear dequantised, some of them with an update."""
    bases: Weights = {}
    pair.change(bases.update, side="base")

    def merge(weights: Weights) -> None:
        torch.manual_seed(5)
        for name, base in sorted(bases.items()):
            if "_proj" in name:
                weights[name] = _by_hand(base, double=double)
            if any(part in name for part in adapted.split("|")):
                rows, columns = base.shape
                update = scale * torch.randn(rows, RANK) @ torch.randn(RANK, columns)
                weights[name] = (weights[name].float() + update).to(base.dtype)

    pair.change(merge)


@pytest.mark.parametrize("adapted", [SOME, EVERY])
@pytest.mark.parametrize("double", [True, False])
def test_the_quantisation_is_found_and_the_planted_rank_comes_out_on_that_base(
    make_pair: MakePair, double: bool, adapted: str
) -> None:
    pair = make_pair("Llama", "nothing", hidden_size=96)
    _trained(pair, double=double, adapted=adapted)
    extraction = pair.extracted(dtype="float32")
    summary, found = extraction.summary, extraction.summary.base_quantisation
    linears = LINEARS if adapted == EVERY else 4
    assert found is not None
    assert (found.kind, found.double, found.dtype, len(found.tensors)) == ("nf4", double, "bfloat16", LINEARS)
    assert [(count.rank, count.modules) for count in summary.ranks] == [(RANK, linears)]
    assert summary.tensors_equal == 21 - linears
    assert summary.ratio is not None
    assert 0.9 < summary.ratio.min < summary.ratio.max < 1.1
    function = pair.validated(extraction).function
    assert function is not None
    assert function.ratio < 0.05


@pytest.mark.parametrize("scale", [5e-4, 0.05])
def test_small_and_large_updates_hide_no_quantisation(make_pair: MakePair, scale: float) -> None:
    pair = make_pair("Llama", "nothing", hidden_size=96)
    _trained(pair, adapted=EVERY, scale=scale)
    summary = pair.extracted(dtype="float32").summary
    found = summary.base_quantisation
    assert found is not None
    assert (found.kind, found.double, found.dtype) == ("nf4", True, "bfloat16")
    assert (summary.linears, summary.rank) == (LINEARS, RANK)


def test_a_merge_into_the_base_as_it_is_has_no_quantisation(make_pair: MakePair) -> None:
    pair = make_pair("Llama", EVERY, hidden_size=96)
    extraction = pair.extracted()
    assert extraction.summary.base_quantisation is None
    assert "base_quantisation" not in extraction.to_json()


def test_publish_merge_writes_the_release_with_the_dequantised_weights(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "nothing", hidden_size=96)
    _trained(pair)
    extraction = pair.extracted(dtype="float32", method="exact", residual=True)
    base = fetch(Reference(path="base"), memo=Path("memo.json"), progress=silent)
    with open_inputs(extraction, base, staged=pair.staged) as inputs:
        done = write_merged(inputs, base, out=Path("merged"), again_fp8=False, progress=silent)
    assert done.released
    ours, theirs = (_logits(Path(folder)) for folder in ("merged", "source"))
    assert torch.equal(ours, theirs)


def _logits(folder: Path) -> Tensor:
    with quiet(), torch.inference_mode():
        model: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        logits: Tensor = model(input_ids=torch.arange(16)[None]).logits
    return logits


def test_a_model_that_lacks_a_quantised_weight_is_refused() -> None:
    how = QuantisedBase(kind="nf4", double=False, dtype="float32", tensors=("weight", "gone.weight"))
    layer = torch.nn.Linear(64, 2, bias=False)
    with pytest.raises(ValidationError, match=r"Linear lacks 1 weight of the quantised base, the first gone\.weight"):
        set_quantised(layer, how)
    before = layer.weight.detach().clone()
    set_quantised(layer, how.model_copy(update={"tensors": ("weight",)}))
    assert torch.allclose(layer.weight, _by_hand(before, double=False))
    assert not torch.equal(layer.weight, before)
