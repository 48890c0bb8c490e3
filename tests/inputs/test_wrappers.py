"""Prefixes of wrappers are read through on either side, from the manifest to the logits."""

from collections.abc import Callable

import pytest

from publisher.checkpoints.wrappers import key_mapping, unwrapped
from publisher.manifest.new import new_manifest
from tests.inputs.pairs import RANK, Pair, Weights

MakePair = Callable[..., Pair]

WRAPPED: dict[str, Callable[[str], str]] = {
    "torch.compile": lambda name: f"_orig_mod.{name}",
    "DistributedDataParallel": lambda name: f"module.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "PEFT, unloaded": lambda name: f"module.base_model.model.{name}",
    "a compiled part": lambda name: name.replace("self_attn.", "self_attn._orig_mod."),
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name.replace('layers.0.', 'layers.0._fsdp_wrapped_module.')}",
    "activation checkpointing": lambda name: name.replace("mlp.", "mlp._checkpoint_wrapped_module."),
}


def wrap(wrapped: Callable[[str], str]) -> Callable[[Weights], None]:
    def recipe(weights: Weights) -> None:
        for name in list(weights):
            weights[wrapped(name)] = weights.pop(name)

    return recipe


def require_published(pair: Pair) -> None:
    assert "16 weight matrices in common" in new_manifest(base="base", tuned="source")
    found = pair.extracted()
    assert {(module.name, module.rank) for module in found.modules} == {
        (f"model.layers.{layer}.self_attn.q_proj", RANK) for layer in range(2)
    }
    function = pair.validated(found).function
    assert function is not None
    assert function.ratio < 0.1


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED.keys())
def test_a_source_with_prefixes_is_published(make_pair: MakePair, wrapped: Callable[[str], str]) -> None:
    pair = make_pair("Llama", "q_proj")
    pair.change(wrap(wrapped))
    require_published(pair)


def test_both_sides_may_have_prefixes_of_their_own(make_pair: MakePair) -> None:
    pair = make_pair("Llama", "q_proj")
    pair.change(wrap(WRAPPED["both"]))
    pair.change(wrap(WRAPPED["a compiled part"]), side="base")
    require_published(pair)


def test_names_without_prefixes_stay_and_need_no_mapping() -> None:
    names = ["module.0.weight", "encoder.module.weight"]
    assert unwrapped(names) == {name: name for name in names}
    assert key_mapping(names) is None


def test_a_class_whose_own_names_begin_so_keeps_them() -> None:
    names = ["module.a.weight", "module.b.weight"]
    assert unwrapped(names, own=names) == {name: name for name in names}
