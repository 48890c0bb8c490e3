"""What `--stream` reads and stores, against a run that downloads both checkpoints: `make bench`.

A pair of eight linears (4096 x 4096, bf16, three of them changed) and an embedding in a shard of its own, which is
equal on both sides, is uploaded to a local Hub. `publish extract` then takes the adapter out twice, each time as a
process of its own with an empty cache, first stored, then streamed. Bytes read are those the Hub sent; the disk and the
process's resident memory are looked at every 20 ms. The bytes count; seconds on this machine's loopback say nothing of
a network.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}  # Xet would keep a second copy

import psutil
import torch
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors.torch import save_file

from publisher.hub.local import LocalHub

ROOT = Path(__file__).resolve().parent.parent
SIDE, VOCABULARY, LINEARS, RANK = 4096, 16384, 8, 16
CHANGED = (2, 5, 6)
SHARDS = ((), (0, 1, 2, 3), (4, 5, 6, 7))  # linears in each; the first holds the embedding
MANIFEST = """\
version: 1
repo: bench/lora
license: mit
variants:
  - path: /
    label: Bench
    source: {{repo: bench/source, revision: {source}}}
    base: {{repo: bench/base, revision: {base}}}
    model_class: LlamaForCausalLM
    adapter: {{method: svd, rank: {rank}, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}}
card: {{template: lora_card.md.j2, title: Bench, summary: A benchmark.}}
"""
HEADINGS = ("run", "read MB", "of the pair", "peak disk MB", "without results", "peak memory MB", "seconds")
WIDTHS = (9, 8, 12, 13, 16, 15, 7)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run; sizes in bytes. `files` names each result and its digest."""

    read: int
    disk: int
    disk_without_results: int
    memory: int
    seconds: float
    files: dict[str, str]


def main() -> None:
    """Make and upload the pair, run both ways, and print a line for each."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    with TemporaryDirectory() as name, LocalHub(Path(name, "hub")) as hub:
        folder = Path(name)
        weights = {side: _uploaded(hub, folder / side) for side in ("source", "base")}
        pins = {side: hub.repository(f"bench/{side}").head() for side in weights}
        (folder / "bench.yaml").write_text(MANIFEST.format(**pins, rank=RANK), encoding="utf-8")
        pair = sum(weights.values())
        print(f"a pair of {pair / 1e6:.0f} MB; its largest two tensors: {4 * SIDE * VOCABULARY / 1e6:.0f} MB")
        print(_row(HEADINGS))
        runs = {way: _measured(hub, folder, streamed=way == "streamed") for way in ("stored", "streamed")}
        for way, run in runs.items():
            sizes = (run.disk, run.disk_without_results, run.memory)
            megabytes = [f"{size / 1e6:,.1f}" for size in sizes]
            print(_row((way, f"{run.read / 1e6:.0f}", f"{run.read / pair:.0%}", *megabytes, f"{run.seconds:.1f}")))
        print(f"same bytes: {'yes' if runs['stored'].files == runs['streamed'].files else 'NO'}")


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


# --- the pair -----------------------------------------------------------------------------------------------


def _uploaded(hub: LocalHub, folder: Path) -> int:
    """Make one side, put it into bench/SIDE on the Hub and delete it here; bytes of its weights."""
    folder.mkdir()
    for number, linears in enumerate(SHARDS, start=1):
        tensors = {f"model.layers.{index}.mlp.up_proj.weight": _linear(index, folder.name) for index in linears}
        save_file(tensors or {"model.embed_tokens.weight": _noise(VOCABULARY, seed=99)}, folder / _shard(number))
    shards = {f"model.layers.{i}.mlp.up_proj.weight": _shard(n) for n, own in enumerate(SHARDS, 1) for i in own}
    index = {"weight_map": shards | {"model.embed_tokens.weight": _shard(1)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    api, size = HfApi(endpoint=hub.endpoint, token=hub.token), 0
    api.create_repo(f"bench/{folder.name}")
    operations = [CommitOperationAdd(file.name, file) for file in folder.iterdir()]
    api.create_commit(f"bench/{folder.name}", operations, commit_message="weights")
    for file in folder.iterdir():
        size += file.stat().st_size
        file.unlink()
    return size


def _shard(number: int) -> str:
    return f"model-{number:05}-of-{len(SHARDS):05}.safetensors"


def _linear(index: int, side: str) -> torch.Tensor:
    weight = _noise(SIDE, seed=index)
    if side == "base" or index not in CHANGED:
        return weight
    generator = torch.Generator().manual_seed(1000 + index)
    left, right = (torch.randn(shape, generator=generator) for shape in ((SIDE, RANK), (RANK, SIDE)))
    return (weight.float() + 1e-4 * left @ right).bfloat16()


def _noise(rows: int, *, seed: int) -> torch.Tensor:
    return (torch.randn(rows, SIDE, generator=torch.Generator().manual_seed(seed)) / math.sqrt(SIDE)).bfloat16()


# --- a run --------------------------------------------------------------------------------------------------


def _measured(hub: LocalHub, folder: Path, *, streamed: bool) -> Measured:
    home, dist, before = folder / f"home-{streamed}", folder / f"dist-{streamed}", hub.bytes_sent
    command = [sys.executable, "-m", "publisher", "--until", "extract", "--device", "cpu", "--dist", str(dist)]
    command += ["--manifest", str(folder / "bench.yaml"), *(["--stream"] if streamed else [])]
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": str(ROOT),
    }
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    disk = others = memory = 0
    while process.poll() is None:
        everything = _size(home) + _size(dist)
        disk, others = max(disk, everything), max(others, everything - _results(dist))
        with suppress(psutil.Error):  # it has just ended
            memory = max(memory, psutil.Process(process.pid).memory_info().rss)
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    files = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (dist / "bench").iterdir()}
    return Measured(hub.bytes_sent - before, disk, others, memory=memory, seconds=seconds, files=files)


def _results(dist: Path) -> int:
    """Return the bytes of the adapter and of the finished modules."""
    return _size(dist / "bench") + sum(map(_size, dist.glob("bench.work/*/modules-*")))


def _size(folder: Path) -> int:
    size = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):  # gone since it was listed
            size += file.lstat().st_size if file.is_file() and not file.is_symlink() else 0
    return size


if __name__ == "__main__":
    main()
