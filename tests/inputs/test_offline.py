"""The whole way of a class without a task type, on a machine without a network: from `publish new` to the read-back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import publisher
from publisher.adapters.loading import quiet
from tests.commands import publish
from tests.inputs.classes import CASES
from tests.inputs.pairs import Pair, tune


@pytest.mark.long
def test_whisper_is_published_to_the_local_hub_with_offline_mode_on(tmp_path: Path) -> None:
    case = CASES["Whisper"]
    pair = Pair(tmp_path, case.model_class)
    torch.manual_seed(11)
    with quiet():
        model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**case.config))
        for folder in (pair.base, pair.source):
            model.to(torch.bfloat16).save_pretrained(folder)
    pair.change(lambda weights: tune(weights, case.pattern, dtype=torch.bfloat16))
    assert publish("new", "--source", "source", "--base", "base", "-o", "m.yaml", folder=tmp_path).returncode == 0
    assert "task_type: null" in (tmp_path / "m.yaml").read_text()
    told = command(tmp_path, "--manifest", "m.yaml", "--hub", "local")
    assert "1 adapters load with PEFT" in told
    card = (tmp_path / "dist/m/README.md").read_text()
    assert "from transformers import WhisperForConditionalGeneration\n" in card
    assert "AutoModelForCausalLM" not in card.partition("### Loads with")[0]


def command(folder: Path, *arguments: str) -> str:
    """What a command prints, with HF_HUB_OFFLINE set before anything is imported."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(publisher.__file__).parents[1])}
    environment.pop("HF_ENDPOINT", None)
    done = subprocess.run(
        [sys.executable, "-m", "publisher", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
