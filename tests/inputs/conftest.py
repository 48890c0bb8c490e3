"""Pairs of checkpoints for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from publisher.adapters.loading import quiet
from tests.inputs.pairs import ARCHITECTURES, Pair, tune


@pytest.fixture
def make_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    """`make_pair("Llama", "q_proj|v_proj")`: a base of that architecture, and a fine-tune with a rank-2 update.

    Every 2-D weight whose name matches the pattern has the update.
    """
    monkeypatch.chdir(tmp_path)

    def make(architecture: str, pattern: str, **config: Any) -> Pair:
        name, sizes = ARCHITECTURES[architecture]
        model_class = getattr(transformers, name)
        torch.manual_seed(11)
        pair = Pair(tmp_path, name)
        with quiet():
            model = model_class(model_class.config_class(**sizes | config)).to(torch.bfloat16)
            for folder in (pair.base, pair.source):
                model.save_pretrained(folder)
        pair.change(lambda weights: tune(weights, pattern))
        return pair

    return make
