"""Small bases of real classes, and adapters that PEFT itself writes for them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from publisher.adapters.loading import quiet
from publisher.checkpoints.files import read_config
from publisher.loaders import judge
from publisher.loaders.subject import Base, class_for, read_subject
from publisher.records.loaders import LoaderVerdict
from publisher.records.validation import Validation

_TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SUFFIXES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LINEAR = [*SUFFIXES, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]


def built(architecture: str, **changes: Any) -> Any:
    """A model of this class with random weights."""
    torch.manual_seed(3)
    model_class = getattr(transformers, architecture)
    if architecture == "Qwen3_5ForConditionalGeneration":
        sizes: dict[str, Any] = {"text_config": _TEXT | _LINEAR_ATTENTION | changes, "vision_config": _VISION}
    elif architecture == "Qwen3_5ForCausalLM":
        sizes = _TEXT | _LINEAR_ATTENTION | changes
    else:
        sizes = (_GPT2 if architecture == "GPT2LMHeadModel" else _TEXT) | changes
    return model_class(model_class.config_class(**sizes)).eval()


@dataclass
class Made:
    """An adapter in a folder, as PEFT wrote it, and the folder of its base."""

    folder: Path
    base: Path

    def change(self, **fields: Any) -> "Made":
        """Set fields of adapter_config.json."""
        file = self.folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return self

    def rename(self, recipe: Callable[[str], str | None]) -> "Made":
        """Give the tensors other names, or drop those that get none."""
        file = self.folder / "adapter_model.safetensors"
        renamed = {recipe(name): tensor for name, tensor in load_file(file).items()}
        save_file({name: tensor for name, tensor in renamed.items() if name}, file, metadata={"format": "pt"})
        return self

    @property
    def config(self) -> dict[str, Any]:
        """What adapter_config.json holds."""
        found: dict[str, Any] = json.loads((self.folder / "adapter_config.json").read_text())
        return found

    def on(self, base: Path) -> "Made":
        """The same adapter, for another base."""
        return Made(self.folder, base)

    def judged(self, validation: Validation | None = None, *, subfolder: str = "") -> Mapping[str, LoaderVerdict]:
        """The verdicts by loader."""
        base = Base(self.base, class_for({}, read_config(self.base)))
        subject = read_subject(self.folder, base, subfolder=subfolder)
        return {one.loader: one for one in judge(subject, validation)}


Make = Callable[..., Made]


@pytest.fixture
def base_of(tmp_path: Path) -> Callable[..., Path]:
    """`base_of("LlamaForCausalLM", num_hidden_layers=2)`: the folder of such a model, saved."""

    def save(architecture: str, **changes: Any) -> Path:
        folder = tmp_path / "-".join([architecture, *map(str, changes.values())])
        if not folder.is_dir():
            with quiet():
                built(architecture, **changes).save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def make(tmp_path: Path, base_of: Callable[..., Path]) -> Make:
    """`make("LlamaForCausalLM", use_rslora=True)`: an adapter by PEFT with these settings, whose B is not zero."""

    def made(architecture: str = "LlamaForCausalLM", **settings: Any) -> Made:
        wanted: dict[str, Any] = {"r": 4, "lora_alpha": 4, "init_lora_weights": False} | settings
        wanted.setdefault("target_modules", LINEAR if "Qwen3_5" in architecture else SUFFIXES)
        model = peft.get_peft_model(built(architecture), peft.LoraConfig(**wanted))
        folder = tmp_path / "adapter"
        model.save_pretrained(folder)
        return Made(folder, base_of(architecture)).change(init_lora_weights=True)

    return made


@pytest.fixture
def qwen(make: Make) -> Made:
    """An adapter for every linear of the language model of a small Qwen3.5 with vision tower, by suffixes."""
    return make("Qwen3_5ForConditionalGeneration")
