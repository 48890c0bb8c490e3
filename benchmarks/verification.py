"""How long 500 requests take through a demo variant, and whether one model is in memory at a time: `make bench`.

`publish verify` runs as a process of its own, from no answers to verification.json; its resident memory is looked at
every 20 ms. Then the answers of base + adapter are removed and it runs again: now it loads that model alone. What both
models in one run take beyond one is the last column. The second pair is wide, so that its weights are most of what the
process holds. Seconds are this machine's; the requests are short (some 160 to 210 tokens).
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import yaml

from publisher.cli.demo.checkpoints import PAIRS, Pair, make_pairs
from publisher.cli.demo.requests import write_rows
from publisher.records.files import packaged_folder

ROOT = Path(__file__).resolve().parent.parent
WIDE = Pair("wide", layers=4, first_adapted=0, hidden=2048, intermediate=8192, heads=16)
HEADINGS = ("pair", "requests", "weights MB", "both models s", "peak MB", "one model: peak MB", "both / one")


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `publish verify`."""

    seconds: float
    peak: int


def main() -> None:
    """Measure both pairs, and print a line for each."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    print("  ".join(HEADINGS))
    for pair, count in ((PAIRS[0], 500), (WIDE, 16)):
        with TemporaryDirectory() as name:
            print(_line(pair, count, folder=Path(name)), flush=True)


def _line(pair: Pair, count: int, *, folder: Path) -> str:
    _prepare(pair, count, folder=folder)
    _publish(folder, "--manifest", "bench.yaml", "--until", "validate")
    both = _publish(folder, "verify", "--manifest", "bench.yaml")
    _forget_the_adapted(folder)
    one = _publish(folder, "verify", "--manifest", "bench.yaml")
    weights = sum(file.stat().st_size for file in (folder / "demo" / pair.name).glob("model*.safetensors"))
    sizes = (weights / 1e6, both.seconds, both.peak / 1e6, one.peak / 1e6)
    cells = (pair.name, str(count), *(f"{size:,.0f}" for size in sizes), f"{both.peak / one.peak:.2f}")
    return "  ".join(cell.ljust(len(heading)) for cell, heading in zip(cells, HEADINGS, strict=True)).rstrip()


def _prepare(pair: Pair, count: int, *, folder: Path) -> None:
    make_pairs([pair], folder / "demo")
    write_rows(folder / "requests.jsonl", "bench", count=count)
    manifest = yaml.safe_load((packaged_folder("manifests") / "demo.yaml").read_text(encoding="utf-8"))
    variant = manifest["variants"][0]
    del variant["expect"]
    for side, path in (("source", pair.name), ("base", pair.base)):
        variant[side] = {"path": f"demo/{path}"}
    variant["verification"]["sets"] = [{"name": "Bench", "file": "requests.jsonl"}]
    (folder / "bench.yaml").write_text(json.dumps(manifest | {"variants": [variant]}), encoding="utf-8")


def _forget_the_adapted(folder: Path) -> None:
    """Forget the answers of base + adapter; the released model was asked first."""
    answers = sorted((folder / "dist/bench.work/root/answers").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    answers[-1].unlink()


def _publish(folder: Path, *arguments: str) -> Measured:
    start, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "publisher", *arguments, "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    log = folder / "log.txt"
    with (
        log.open("wb") as said,
        subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said) as process,
    ):
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, watched.memory_info().rss)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"publish {' '.join(arguments)} failed:\n{log.read_text(encoding='utf-8')}")
    return Measured(time.monotonic() - start, peak)


if __name__ == "__main__":
    main()
