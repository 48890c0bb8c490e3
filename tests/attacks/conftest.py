"""A small finished release for attackers: a Llama pair of two layers, its manifest, its requests, one whole dry run."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.conftest import once, shared_folder
from tests.models import add_update, small_llama
from tests.words import write_tokenizer

MANIFEST = """version: 1
repo: tiny/lora
license: apache-2.0
variants:
  - path: /
    label: Tiny
    source: {path: src}
    base: {path: base}
    model_class: LlamaForCausalLM
    adapter: {method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}
    verification: {runner: logits, sets: [{name: A, file: a.jsonl}]}
card: {template: lora_card.md.j2, title: tiny-lora, summary: A tiny adapter.}
"""
_WORDS = 60


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ./base, ./src, ./a.jsonl, ./m.yaml, ./dist/m and ./dist/m.work. Read it, never write into it."""
    folder = shared_folder(tmp_path_factory) / "tiny"
    once(tmp_path_factory, "tiny", lambda: _make(folder))
    return folder


@pytest.fixture
def own_tiny_run(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder to change or spoil; it is the working folder too."""
    folder = tmp_path / "tiny"
    shutil.copytree(tiny_run, folder)
    monkeypatch.chdir(folder)
    return folder


def _make(folder: Path) -> None:
    folder.mkdir(parents=True)
    _write_pair(folder)
    write_tokenizer(folder / "src")
    _write_requests(folder / "a.jsonl")
    (folder / "m.yaml").write_text(MANIFEST, encoding="utf-8")
    with contextlib.chdir(folder):
        run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True), silent)


def _write_pair(folder: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 64}
    model = small_llama(sizes, seed=0, spread=0.05)
    model.save_pretrained(folder / "base")
    add_update(model, "q_proj|down_proj", rank=4, scale=0.01)
    model.save_pretrained(folder / "src")


def _write_requests(file: Path) -> None:
    texts = (" ".join(f"w{(7 * place + step) % _WORDS}" for step in range(8)) for place in range(40))
    lines = (json.dumps({"id": f"r{place}", "text": text}) + "\n" for place, text in enumerate(texts))
    file.write_text("".join(lines), encoding="utf-8")
