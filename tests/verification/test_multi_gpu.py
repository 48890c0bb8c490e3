"""Which layer goes on which GPU; that they compute there cannot be seen on a machine without any."""

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from publisher.errors import VerificationError
from publisher.verification.multi_gpu import device_map, spread_over_gpus
from tests.models import small_llama

LAYERS = 6


@pytest.fixture(params=["plain", "adapted"])
def network(request: pytest.FixtureRequest) -> Any:
    """A Llama of six layers, without and with an adapter on it."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}
    model = small_llama(sizes, seed=0, dtype=torch.float32)
    if request.param == "plain":
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))


def size_of(network: Any) -> int:
    return sum(parameter.nbytes for parameter in network.parameters())


def test_a_layer_stays_whole_and_every_gpu_gets_some(network: Any) -> None:
    found = device_map(network, dict.fromkeys(range(2), int(0.9 * size_of(network))))
    places: dict[str, set[int]] = {}
    for name, place in found.items():
        if layer := re.search(r"layers\.(\d+)", name):
            places.setdefault(layer[1], set()).add(place)
    assert len(places) == LAYERS
    assert {frozenset(place) for place in places.values()} == {frozenset({0}), frozenset({1})}
    assert all(any(name.startswith(prefix) for prefix in found) for name, _ in network.named_parameters())


def test_a_model_that_they_do_not_hold_is_refused(network: Any) -> None:
    with pytest.raises(VerificationError, match=r"2 GPUs with .* GB free do not hold the model.*--model-gpus"):
        device_map(network, dict.fromkeys(range(2), size_of(network) // 4))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has two GPUs")
def test_more_gpus_than_there_are_is_told(network: Any) -> None:
    with pytest.raises(VerificationError, match=r"--model-gpus 2, and there are \d here"):
        spread_over_gpus(network, 2)
