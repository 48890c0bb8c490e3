"""A release of pico models: two fine-tunes of one Llama with two layers, extracted in a second or two."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from publisher.pipeline.run import Run, run
from publisher.records.progress import silent

_ADAPTER = "{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}"
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_RANK = 6  # above the height of k_proj and v_proj, which are narrower in the adapter


@pytest.fixture(scope="session")
def pico_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and its fine-tunes `one` and `two`, in bf16. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("pairs")
    transformers.logging.disable_progress_bar()
    torch.manual_seed(5)
    base = _llama().to(torch.bfloat16)
    base.save_pretrained(folder / "base")
    for name in ("one", "two"):
        tuned = _llama().to(torch.bfloat16)
        tuned.load_state_dict({key: _merged(key, tensor) for key, tensor in base.state_dict().items()})
        tuned.save_pretrained(folder / name)
    return folder


def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=4,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def _merged(name: str, weight: torch.Tensor) -> torch.Tensor:
    if name.split(".")[-2] not in _LINEARS:
        return weight
    rows, columns = weight.shape
    update = 0.02 * torch.randn(rows, _RANK) @ torch.randn(_RANK, columns)
    return (weight.float() + update).bfloat16()


def manifest_of(references: dict[str, str], *, repo: str) -> str:
    """A manifest with two variants: `one` at the root, `two` in `small/`; references as YAML flow mappings."""
    variants = "".join(
        f"  - path: {path}\n    label: Pico {name}\n    source: {references[name]}\n    base: {references['base']}\n"
        f"    model_class: LlamaForCausalLM\n    adapter: {_ADAPTER}\n"
        for path, name in (("/", "one"), ("small/", "two"))
    )
    card = "card: {template: lora_card.md.j2, title: Pico, summary: Adapters of two pico models.}\n"
    return f"version: 1\nrepo: {repo}\nlicense: apache-2.0\nvariants:\n{variants}{card}"


Staging = Callable[[Path, dict[str, str], str], Path]


@pytest.fixture(scope="session")
def stage_release() -> Staging:
    """`stage_release(folder, references, repo)` runs extract and card in `folder`; the staged tree."""
    return _staged


def _staged(folder: Path, references: dict[str, str], repo: str) -> Path:
    (folder / "pico.yaml").write_text(manifest_of(references, repo=repo), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for first, last in (("fetch", "extract"), ("card", "card")):
            run(Run(Path("pico.yaml"), Path("dist"), device="cpu", first=first, last=last), silent)
    return folder / "dist" / "pico"


@pytest.fixture(scope="session")
def pico_release(tmp_path_factory: pytest.TempPathFactory, pico_pairs: Path, stage_release: Staging) -> Path:
    """A staged tree from local pairs, which are at `pairs` in the folder above `dist`. Read it, copy it."""
    folder = tmp_path_factory.mktemp("release")
    (folder / "pairs").symlink_to(pico_pairs)
    return stage_release(folder, {name: f"{{path: pairs/{name}}}" for name in ("base", "one", "two")}, "o/pico")
