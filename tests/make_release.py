"""Write a small release into tests/releases/, where it stays for ever: `python -m tests.make_release KIND`.

Each later version must audit it green (tests/integration/test_releases_of_before.py). A release is made once, by the
version that it bears in its name, and never again: a folder that is there is not overwritten. Make one of each kind
whenever the version changes.
"""

import argparse
import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from publisher import __version__
from publisher.pipeline.run import Run, run
from publisher.records.progress import silent
from tests.models import small_llama
from tests.words import write_tokenizer

RELEASES = Path(__file__).parent / "releases"
KINDS = {
    "svd": [("", "{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}")],
    "uniform": [("", "{method: svd, rank: 6, dtype: float32, layout: uniform, task_type: CAUSAL_LM}")],
    "carry": [
        ("", "{method: svd, rank: 4, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM, carry: [model.norm.*]}")
    ],
    "ignore": [
        ("", "{method: svd, rank: 4, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM, ignore: [model.norm.*]}")
    ],
    "exact": [("", "{method: exact, rank: 4, dtype: float32, layout: pattern, task_type: CAUSAL_LM, residual: true}")],
    "approximation": [("", "{method: svd, rank: 4, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}")],
    "exports": [("", "{method: svd, rank: 4, dtype: float32, layout: uniform, task_type: CAUSAL_LM, exports: [mlx]}")],
    "two": [
        ("", "{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}"),
        ("small", "{method: svd, rank: 5, dtype: float32, layout: uniform, task_type: CAUSAL_LM}"),
    ],
    "verified": [("", "{method: svd, rank: 4, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}")],
}
_NORM = ("carry", "ignore")  # kinds whose norm was trained too
_WORDS = 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the release that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.make_release", description=__doc__)
    parser.add_argument("kind", choices=sorted(KINDS))
    make(parser.parse_args(arguments).kind, RELEASES)


def make(kind: str, releases: Path) -> Path:
    """Return the folder of a new release of this kind below `releases`.

    It holds `release/`, all that would be pushed, and of each base the config.json, which the audit loads the adapter
    on.

    Raises:
        FileExistsError: this version has made one of this kind already.
    """
    place = releases / f"{__version__}-{kind}"
    if place.exists():
        raise FileExistsError(f"{place} is there, and a release of before is never made again")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("m.yaml").write_text(_manifest(kind), encoding="utf-8")
        for number, (name, _) in enumerate(KINDS[kind]):
            _write_pair(name, kind=kind, seed=number)
        _write_requests(Path("requests.jsonl"))
        run(Run(Path("m.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
        shutil.copytree("dist/m", place / "release")
        for name, _ in KINDS[kind]:
            (place / f"base{name}").mkdir()
            shutil.copyfile(f"base{name}/config.json", place / f"base{name}" / "config.json")
    return place


def _manifest(kind: str) -> str:
    verification = "\n    verification: {runner: logits, sets: [{name: Words 12, file: requests.jsonl}]}"
    variants = "".join(
        f"""
  - path: {f"{name}/" if name else "/"}
    label: {f"Tiny {name}".strip()}
    source: {{path: source{name}}}
    base: {{path: base{name}}}
    model_class: LlamaForCausalLM
    adapter: {settings}{verification if kind in {"verified", "two"} and not name else ""}"""
        for name, settings in KINDS[kind]
    )
    return f"""version: 1
repo: tiny/{kind}
license: apache-2.0
variants:{variants}
card: {{template: lora_card.md.j2, title: tiny-{kind}, summary: One of 12 small adapters. It answers nothing.}}
"""


def _write_pair(name: str, *, kind: str, seed: int) -> None:
    model = small_llama({"num_hidden_layers": 3 + seed, "max_position_embeddings": 64}, seed=seed, spread=0.05)
    model.save_pretrained(f"base{name}")
    _train(model, kind)
    model.save_pretrained(f"source{name}")
    write_tokenizer(Path(f"source{name}"))


def _train(model: LlamaForCausalLM, kind: str) -> None:
    """Change the model as a merged LoRA of rank 4, or in the narrower modules of rank 2, would have."""
    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and ("q_proj" in path or "down_proj" in path):
                rows, columns = layer.weight.shape
                rank = 2 if path.endswith("q_proj") else 4
                update = 0.01 * torch.randn(rows, rank) @ torch.randn(rank, columns)
                if kind == "approximation":
                    update += 0.003 * torch.randn(rows, columns)
                layer.weight.copy_((layer.weight.float() + update).bfloat16())
        if kind in _NORM:
            weight = model.model.norm.weight
            weight.copy_((weight.float() + 0.02 * torch.randn(weight.shape)).bfloat16())


def _write_requests(file: Path) -> None:
    texts = (" ".join(f"w{(7 * place + step) % _WORDS}" for step in range(6)) for place in range(24))
    lines = (json.dumps({"id": f"r{place}", "text": text}) + "\n" for place, text in enumerate(texts))
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
