"""Extraction as a whole process, on layers with the real shapes of Clef's 27B, beside a full-SVD extractor.

Pairs of checkpoints of one and of several Gated DeltaNet layers are made, with one more tensor that is equal on both
sides. `publish` extracts them up to its adapter, in a process of its own whose time and peak memory are taken. The
yardstick (`full_svd.py`), with as many threads, does one tensor of each distinct shape, and the time of each counts as
often as its shape occurs: it takes minutes for a layer.

    python -m benchmarks.whole [--layers N] [--write docs/performance.md]
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file

from benchmarks import extraction

RANK = extraction.RANK
LAYER = {name: shape for name, shape in extraction.LINEARS.items() if not name.startswith("self_attn.")}
EQUAL = ("model.language_model.embed_tokens.weight", (65536, 5120))
MANIFEST = f"""\
version: 1
repo: bench/bench
license: apache-2.0
variants:
  - path: /
    label: Bench
    source: {{path: source}}
    base: {{path: base}}
    model_class: LlamaForCausalLM
    adapter: {{method: svd, rank: {RANK}, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}}
card: {{template: lora_card.md.j2, title: Bench, summary: Bench.}}
"""
CLEF = {  # bytes of source and base, elements of the adapted linears
    "Clef (27B)": (2 * 55.0e9, 18 * 383_221_760 + 6 * 372_244_480),
    "Clef-flash (9B)": (2 * 19.1e9, 24 * 218_365_952 + 8 * 209_715_200),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A process that ended well: seconds on the clock and of the processors, peak resident bytes, what it printed."""

    clock: float
    cpu: float
    peak: int
    told: dict[str, Any]


def main() -> None:
    """Make the pairs, run both extractors, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="how many layers `several` are [4]")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page instead of printing it")
    parser.add_argument("--folder", type=Path, help="where the pairs are made, some 2 GB a layer [a temporary one]")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)  # how it calls itself
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(JOBS[arguments.job[0]](int(arguments.job[1]))))
        return
    with TemporaryDirectory(dir=arguments.folder) as folder:
        page = _page(Path(folder), layers=arguments.layers)
    if arguments.write:
        arguments.write.write_text(page, encoding="utf-8")
    else:
        print(page)


# --- the pairs ----------------------------------------------------------------------------------------------


def _make(layers: int) -> dict[str, float]:
    """Make a pair of so many layers in the working folder; weights of one shape are the same in all of them."""
    for side in ("source", "base"):
        Path(side).mkdir(parents=True)
        Path(side, "config.json").write_text("{}")
    Path("bench.yaml").write_text(MANIFEST)
    places: dict[str, dict[str, str]] = {"source": {}, "base": {}}
    for index in range(layers):
        _shard(
            index,
            {f"model.language_model.layers.{index}.{name}.weight": shape for name, shape in LAYER.items()},
            places,
        )
    equal = torch.randn(EQUAL[1], generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    for side, names in places.items():
        save_file({EQUAL[0]: equal}, Path(side, "equal.safetensors"), metadata={"side": side})  # or one digest says it
        names[EQUAL[0]] = "equal.safetensors"
        Path(side, "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return {}


def _shard(index: int, shapes: dict[str, tuple[int, int]], places: dict[str, dict[str, str]]) -> None:
    file = f"layer-{index}.safetensors"
    for side in ("source", "base"):
        save_file({name: load_file(_weight(shape))[side] for name, shape in shapes.items()}, Path(side, file))
        places[side] |= dict.fromkeys(shapes, file)


def _weight(shape: tuple[int, int]) -> Path:
    return Path("..", "weights", "{}x{}.safetensors".format(*shape))


def _weights(_: int) -> dict[str, float]:
    """Make a pair of weights of each distinct shape, in the working folder's `weights`."""
    for shape in set(LAYER.values()):
        extraction.make(Path("{}x{}.safetensors".format(*shape)), shape)
    return {}


def _distinct(_: int) -> dict[str, float]:
    """Make the yardstick's pair: one tensor of each distinct shape."""
    for side in ("source", "base"):
        chosen = {name: load_file(_weight(LAYER[name]))[side] for name in extraction.first_of_each_shape(LAYER)}
        save_file({f"{name}.weight": weight for name, weight in chosen.items()}, f"{side}.safetensors")
    return {}


# --- the extractors -----------------------------------------------------------------------------------------


def _ours(_: int) -> dict[str, float]:
    """Run the pipeline up to its adapter, as `publish --until extract` does, and time each kind of work."""
    from publisher.pipeline.run import Run, run

    seconds: dict[str, float] = defaultdict(float)
    told = [("starting", time.perf_counter())]

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        kind = "comparing equal tensors" if what == f"comparing {EQUAL[0]}" else what.partition(" ")[0]
        told.append((kind, time.perf_counter()))

    run(Run(Path("bench.yaml"), Path("dist"), device="cpu", last="extract"), listen)
    listen("end")
    for (kind, begun), after in pairwise(told):
        seconds[kind] += after[1] - begun
    return dict(seconds)


def _process(*command: str, cwd: Path) -> Process:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-m", *command], cwd=cwd, env=environment, stdout=subprocess.PIPE) as child:
        output = child.stdout.read() if child.stdout else b""
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
    scale = 1 if sys.platform == "darwin" else 1024
    told = json.loads(output.splitlines()[-1])
    return Process(time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * scale, told)


def _job(name: str, number: int, *, cwd: Path) -> Process:
    cwd.mkdir(exist_ok=True)
    done = _process("benchmarks.whole", "--job", name, str(number), cwd=cwd)
    print(f"{cwd.name} {name}: {done.cpu:.1f} s of the processors, {done.clock:.1f} s on the clock", file=sys.stderr)
    return done


# --- the page -----------------------------------------------------------------------------------------------


def _page(folder: Path, *, layers: int) -> str:
    _job("weights", 0, cwd=folder / "weights")
    place = folder / "yardstick"
    _job("distinct", 0, cwd=place)
    yardstick = _process(
        "benchmarks.full_svd", "source.safetensors", "base.safetensors", "adapter.safetensors", str(RANK), cwd=place
    )
    shutil.rmtree(place)
    ours = {}
    for count in (1, layers):
        place = folder / f"{count}-layers"
        _job("make", count, cwd=place)
        ours[count] = _job("ours", count, cwd=place)
        shutil.rmtree(place)
    return _text(ours, yardstick, layers=layers)


def _yardstick_of(layers: int, yardstick: Process) -> tuple[float, float]:
    """Return the seconds of the yardstick for so many layers, on the clock and of the processors."""
    often = Counter(LAYER.values())

    def scaled(whole: float, told: dict[str, float]) -> float:
        layer = sum(seconds * often[LAYER[name.removesuffix(".weight")]] for name, seconds in told.items())
        return whole - sum(told.values()) + layers * layer

    return scaled(yardstick.clock, yardstick.told["clock"]), scaled(yardstick.cpu, yardstick.told["cpu"])


def _saved_by_transposing(told: dict[str, float]) -> float:
    """Return the seconds a layer that the yardstick would save by transposing wide matrices first, as measured."""
    shapes = {LAYER[name.removesuffix(".weight")]: seconds for name, seconds in told.items()}
    often = Counter(LAYER.values())
    return sum(often[a, b] * max(s - shapes.get((b, a), s), 0.0) for (a, b), s in shapes.items() if a < b)


def _text(ours: dict[int, Process], yardstick: Process, *, layers: int) -> str:
    several, elements = ours[layers], layers * sum(a * b for a, b in LAYER.values())
    equal_bytes = 2 * EQUAL[1][0] * EQUAL[1][1]
    compare = equal_bytes / several.told["comparing equal tensors"]
    hashed = 2 * (2 * elements + equal_bytes) / several.told["hashing"]
    each = several.told["extracting"] / elements
    clever = _yardstick_of(layers, yardstick)[0] - layers * _saved_by_transposing(yardstick.told["clock"])
    return PAGE.format(
        machine=_machine(),
        rank=RANK,
        rows="\n".join(_row(count, done, _yardstick_of(count, yardstick)) for count, done in ours.items()),
        shapes="\n".join(_shape_row(name, seconds) for name, seconds in yardstick.told["clock"].items()),
        layers=layers,
        growth=f"{several.peak / ours[1].peak - 1:+.1%}",
        stages=", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in several.told.items()),
        compare=f"{compare / 1e9:.2f}",
        hashed=f"{hashed / 1e9:.2f}",
        each=f"{each * 1e9:.0f}",
        clever=f"{clever:.0f}",
        clever_ratio=f"{clever / several.clock:.1f}",
        extrapolated="\n".join(
            f"- {name}: {(size / hashed + size / 2 / compare + total * each) / 60:.0f} minutes"
            for name, (size, total) in CLEF.items()
        ),
        yardstick_peak=f"{yardstick.peak / 2**30:.2f}",
    )


def _row(count: int, done: Process, yardstick: tuple[float, float]) -> str:
    clock, cpu = yardstick
    cells = (
        count,
        f"{done.clock:.0f} s",
        f"{clock:.0f} s",
        f"**{clock / done.clock:.1f}**",
        f"{done.cpu:.0f} s",
        f"{cpu:.0f} s",
        f"{cpu / done.cpu:.1f}",
        f"{done.peak / 2**30:.2f} GiB",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def _shape_row(name: str, seconds: float) -> str:
    shape = LAYER[name.removesuffix(".weight")]
    return f"| {shape[0]} x {shape[1]} | {Counter(LAYER.values())[shape]} | {seconds:.2f} s |"


def _machine() -> str:
    busy = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} logical processors ({platform.machine()}), {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()}; load average at the end {busy:.1f}"
    )


PAGE = """\
# Performance

Written by `python -m benchmarks.whole --write docs/performance.md`, as measured in one run; the method is told in that
file. Seconds belong to the machine, ratios less so.

Machine: {machine}.

## The whole process

Pairs of checkpoints with layers of the 27B's real shapes (Gated DeltaNet, eight linears a layer, bf16), an update of
rank {rank} in each, and one equal tensor. `publish --until extract`, from its start to its end: hashing and comparing
both checkpoints, extraction, kept modules, adapter and evidence. The yardstick is a straightforward extractor
(`benchmarks/full_svd.py`: streamed, float32, thin `torch.linalg.svd` per tensor, no checks) with as many threads.
**It did one tensor of each shape; its time for whole layers is theirs, counted as often as each shape occurs.** Ours
was really run. The ratio in bold is that of the time on the clock.

| layers | ours | yardstick | times faster | ours, processor time | yardstick, likewise | ratio | our peak memory |
|---|---|---|---|---|---|---|---|
{rows}

Peak resident memory from 1 to {layers} layers: {growth}; the yardstick's is {yardstick_peak} GiB. Checkpoints are read
and not mapped, so no page of theirs is left out of it.

On the clock with {layers} layers: {stages}. Extraction takes {each} ns an element.

The yardstick, tensor by tensor, on the clock:

| shape | in a layer | seconds each |
|---|---|---|
{shapes}

LAPACK is slower on a wide matrix than on its transpose, which has the same singular values. An extractor that
transposes first would take {clever} s for {layers} layers, by the same figures: {clever_ratio} times as long as ours.

## Comparison

Equal tensors are compared at {compare} GB of each side a second, from a warm cache, and files hashed at {hashed} GB a
second.

## Extrapolated to the Clef models

From the figures above, by bytes hashed and compared and by elements of the adapted linears. **This is an
extrapolation**: neither model was extracted on this machine, and a cold disk adds its own time.

{extrapolated}
"""
JOBS = {"weights": _weights, "make": _make, "distinct": _distinct, "ours": _ours}

if __name__ == "__main__":
    main()
