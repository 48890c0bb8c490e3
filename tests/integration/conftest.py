"""A release of pico models: two fine-tunes of one Llama with two layers, extracted in a second or two."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.models import add_update, small_llama

_ADAPTER = "{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}"
_RANK = 6  # above the height of k_proj and v_proj, which are narrower in the adapter
_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def pico_pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base` and its fine-tunes `one` and `two`, in bf16. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("pairs")
    transformers.logging.disable_progress_bar()
    base = small_llama(_SIZES, seed=5)
    base.save_pretrained(folder / "base")
    for name in ("one", "two"):
        tuned = copy.deepcopy(base)
        add_update(tuned, r"layers.*_proj$", rank=_RANK, scale=0.02)
        tuned.save_pretrained(folder / name)
    return folder


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
