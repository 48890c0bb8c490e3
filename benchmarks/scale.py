"""What a unit costs beyond one machine: Ray, extraction in a task, comparing, hashing and streaming: `make bench`.

Pairs of weights with real shapes are made in a temporary folder, and a Ray cluster of two nodes of one CPU each is
started on this machine. Each measurement runs in a process of its own with one thread (two where it says so). From the
costs follow, by `benchmarks/capacity.py`, where Ray pays, and what models of other sizes would take.

    python -m benchmarks.scale [--write docs/scale.md]
"""

import argparse
import json
import math
import os
import pickle
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}  # Xet would keep a second copy

import psutil
import ray
import torch
from huggingface_hub import HfApi
from ray.cluster_utils import Cluster
from safetensors.torch import load_file, save_file

from benchmarks import extraction, scale_page
from benchmarks.capacity import RANK, WIDTH, Shape, factors_of
from benchmarks.scale_units import Carrying, Seen, Watched, resident
from publisher.checkpoints.pairs import CheckpointPair, open_pair
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.engines import Engine, Job, engine_named
from publisher.extraction.comparison import Comparing, Weighing
from publisher.extraction.module import Extracting
from publisher.extraction.module_cache import Shelf
from publisher.hub.local import LocalHub
from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.pipeline.stages.validate import Checking, Claim
from publisher.records.checkpoint import Snapshot

ROOT = Path(__file__).resolve().parent.parent
SHAPES: tuple[Shape, ...] = ((2048, 7168), (5120, 6144), (17408, 5120))
EQUAL, PARTS = (16384, 5120), 4  # tensors that are equal, each in a file of its own
CARRIED = ((17408, RANK), (RANK, 5120))  # the factors of the largest shape
WORKERS, STORE = 2, 200_000_000  # nodes of one CPU, and bytes of their object stores
EMPTY, LARGE, BEFORE, RUNS, WAITING = 2000, 200, 16, 3, 1024
Figures = dict[str, Any]


def main() -> None:
    """Measure everything, and print or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the page instead of printing it")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)  # how it calls itself
    arguments = parser.parse_args()
    if arguments.job:
        name, *of = arguments.job
        print(json.dumps(JOBS[name](*of)))
        return
    with TemporaryDirectory() as folder:
        page = scale_page.page(_measured(Path(folder)), shapes=SHAPES)
    if arguments.write:
        arguments.write.write_text(page, encoding="utf-8")
    else:
        print(page)


def _measured(folder: Path) -> Figures:
    """Everything that the page needs, by name."""

    def here(name: str, *of: str, threads: int = 1, **environment: str) -> Figures:
        return _in_own_process(name, *of, cwd=folder, environment={"OMP_NUM_THREADS": str(threads), **environment})

    if any(process.info["name"] == "gcs_server" for process in psutil.process_iter(["name"])):
        raise SystemExit("a Ray cluster runs on this machine, which a run without RAY_ADDRESS would join")
    found = {"start": here("start")}
    here("make")
    found |= {"hash": here("hash"), "compare local": here("compare", "local"), "stream": _streamed(here)}
    for shape in map(_text, SHAPES):
        found |= {f"extract {shape} {threads}": here("extract", "local", shape, threads=threads) for threads in (1, 2)}
        found[f"check {shape}"] = here("check", "local", shape)
    found["weigh"] = here("weigh")
    found["write"] = here("write", _text(SHAPES[-1]))
    found |= {f"{kind} local": here("many", "local", kind) for kind in KINDS}
    with _cluster() as address:
        found |= _on_cluster(lambda *of: here(*of, RAY_ADDRESS=address))
    return found | {"sizes": {"workers": WORKERS, "store": STORE, "waiting": WAITING, "runs": RUNS, "parts": PARTS}}


def _on_cluster(there: Callable[..., Figures]) -> Figures:
    found = {"join": there("start"), "waiting": there("waiting"), "compare ray": there("compare", "ray")}
    found |= {f"{kind} ray": there("many", "ray", kind) for kind in KINDS}
    for shape in map(_text, SHAPES):
        found |= {f"{work} {shape} ray": there(work, "ray", shape) for work in ("extract", "check")}
    return found


@contextmanager
def _cluster() -> Iterator[str]:
    """The address of a cluster on this machine."""
    os.environ |= {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    os.environ["PYTHONPATH"] = str(ROOT)
    cluster = Cluster()
    try:
        for _ in range(WORKERS):
            cluster.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        yield cluster.address
    finally:
        cluster.shutdown()


def _streamed(here: Callable[..., Figures]) -> Figures:
    """Of a local Hub in this process, read by another one."""
    with TemporaryDirectory() as name, LocalHub(Path(name, "hub")) as hub:
        place = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, "HF_HOME": str(Path(name, "home"))}
        place["NO_PROXY"] = "127.0.0.1,localhost"
        here("upload", **place)
        return here("stream", hub.repository("bench/base").head(), **place)


def _in_own_process(name: str, *of: str, cwd: Path, environment: Mapping[str, str]) -> Figures:
    command = [sys.executable, "-m", "benchmarks.scale", "--job", name, *of]
    start = time.perf_counter()
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}
    )
    print(f"{name} {' '.join(of)}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def _text(shape: Shape) -> str:
    return "{}x{}".format(*shape)


# --- what runs in a process of its own: the pairs -----------------------------------------------------------


def _make() -> Figures:
    """Source and base with a tensor of each shape that differs, and some that are equal."""
    for side in ("source", "base"):
        Path(side).mkdir()
        Path(side, "config.json").write_text("{}")
    for shape in SHAPES:
        pair = Path("pair.safetensors")
        extraction.make(pair, shape)
        for side, weight in load_file(pair).items():
            save_file({_name(_text(shape)): weight}, Path(side, f"{_text(shape)}.safetensors"))
        pair.unlink()
    for part in range(PARTS):
        weight = torch.randn(EQUAL, generator=torch.Generator().manual_seed(part)).bfloat16()
        for side in ("source", "base"):  # told apart, or one digest says that they are equal
            save_file({_equal(part): weight}, Path(side, f"equal-{part}.safetensors"), metadata={"side": side})
    places = {_name(text): f"{text}.safetensors" for text in map(_text, SHAPES)}
    places |= {_equal(part): f"equal-{part}.safetensors" for part in range(PARTS)}
    for side in ("source", "base"):
        Path(side, "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return {}


def _name(shape: str) -> str:
    return f"model.layers.{[*map(_text, SHAPES)].index(shape)}.mlp.up_proj.weight"


def _equal(part: int) -> str:
    return f"model.equal.{part}.weight"


def _snapshot(side: str) -> Snapshot:
    return fetch(Reference(path=side), memo=Path("digests.json"), progress=lambda *_: None)


@contextmanager
def _pair() -> Iterator[CheckpointPair]:
    with open_pair(base=_snapshot("base"), tuned=_snapshot("source")) as both:
        yield both


# --- what runs in a process of its own: measurements ---------------------------------------------------------


def _hash() -> Figures:
    """Both checkpoints, from a warm cache; two files at a time, as the driver does it."""
    start = time.perf_counter()
    files = [file for side in ("source", "base") for file in _snapshot(side).checkpoint.files]
    return {"seconds": time.perf_counter() - start, "bytes": sum(file.size for file in files)}


def _compare(engine: str) -> Figures:
    """Equal tensors, from a warm cache."""
    with _pair() as both, engine_named(engine, "cpu") as working:
        seen = _each(working, Comparing(both.snapshots), [(both.tensors(_equal(part)),) for part in range(PARTS)])
    size = 2 * WIDTH * EQUAL[0] * EQUAL[1]
    return {"bytes": size, "seconds": min(one["inside"] for one in seen), "memory": _memory(seen)}


def _weigh() -> Figures:
    """A tensor that is left out or carried: both sides are read, and the squares of the difference added up."""
    with _pair() as both, engine_named("local", "cpu") as working:
        seen = _each(working, Weighing(both.snapshots), [both.tensors(_name(_text(SHAPES[-1])))] * RUNS)
    return {"seconds": min(one["inside"] for one in seen), "bytes": 2 * WIDTH * math.prod(SHAPES[-1])}


def _extract(engine: str, shape: str) -> Figures:
    """One module, from a warm cache; its factors are kept for the check."""
    with _pair() as both, engine_named(engine, "cpu") as working:
        seen = _each(working, Extracting(both.snapshots, extraction.SETTINGS), [both.tensors(_name(shape))] * RUNS)
    Path(f"{shape}.pickle").write_bytes(pickle.dumps(seen[0]["result"]))
    return _fastest(seen)


def _check(engine: str, shape: str) -> Figures:
    """The same module against its factors."""
    factors = pickle.loads(Path(f"{shape}.pickle").read_bytes())  # noqa: S301 - written by `_extract`
    with _pair() as both, engine_named(engine, "cpu") as working:
        claim = Claim(factors.figures, both.tensors(_name(shape)), factors.b, factors.a, residual=None)
        return _fastest(_each(working, Checking(both.snapshots), [claim] * RUNS))


def _each(engine: Engine, job: Job[Any, Any], units: list[Any]) -> list[Figures]:
    """What each unit took, one after the other and each in a run of its own; the first worker is there before."""
    _ = engine.machine
    seen = []
    for unit in units:
        start = time.perf_counter()
        with engine.run(Watched(job), [unit], tell=lambda _: None) as results:
            ((_, one),) = results
        seen.append({**_seen(one), "inside": one.seconds, "seconds": time.perf_counter() - start})
    return seen


def _seen(one: Seen) -> Figures:
    return {"process": one.process, "before": one.before, "peak": one.peak, "result": one.result}


def _fastest(seen: list[Figures]) -> Figures:
    quickest = {part: min(one[part] for one in seen) for part in ("seconds", "inside")}
    return {**quickest, "memory": _memory(seen), "before": seen[0]["before"]}


def _memory(seen: list[Figures]) -> int:
    """Bytes by which a worker's peak lies above what it had before its first unit."""
    first: dict[int, int] = {}
    for one in seen:
        first.setdefault(one["process"], one["before"])
    return max(int(one["peak"] - first[one["process"]]) for one in seen)


KINDS: dict[str, tuple[int, tuple[Shape, ...], tuple[Shape, ...]]] = {  # units, shapes of a unit, of a result
    "empty": (EMPTY, (), ()),
    "results": (LARGE, (), CARRIED),
    "units": (LARGE, CARRIED, ()),
}


def _many(engine: str, kind: str) -> Figures:
    """Units without work, some beforehand so that all workers are there."""
    number, sent, returned = KINDS[kind]
    unit = tuple(torch.ones(shape, dtype=torch.bfloat16) for shape in sent)
    with engine_named(engine, "cpu") as working:
        for count in (BEFORE, number):
            before, start, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
            with working.run(Carrying(returned), [unit] * count, tell=lambda _: None) as results:
                done = sum(1 for _ in results)
            seconds, busy = time.perf_counter() - start, time.process_time() - cpu
    size = sum(factors_of(SHAPES[-1]) for shapes in (sent, returned) if shapes)
    return {
        "each": seconds / done,
        "units": done,
        "driver_cpu": busy / done,
        "bytes": size,
        "before": before,
        "peak": resident("VmHWM"),
    }


def _start() -> Figures:
    """From nothing to a member of a cluster, its own or another, and then to the first worker's answer."""
    start = time.perf_counter()
    with engine_named("ray", "cpu") as engine:
        member = time.perf_counter() - start
        machine = asdict(engine.machine)
        return {"member": member, "first": time.perf_counter() - start - member, "threads": machine["threads"]}


def _waiting() -> Figures:
    """To take one result while so many units are under way, as `publisher/engines/ray_engine.py` does."""
    with engine_named("ray", "cpu"):
        never = ray.remote(resources={"never": 1})(resident)
        running = [never.remote("VmRSS") for _ in range(WAITING)]
        done, start = ray.put(None), time.perf_counter()
        for _ in range(EMPTY // 10):
            ray.wait([*running, done], num_returns=1)
        return {"each": (time.perf_counter() - start) / (EMPTY // 10)}


def _write(shape: str) -> Figures:
    """Factors onto the driver's disk, safe there and hashed."""
    factors = pickle.loads(Path(f"{shape}.pickle").read_bytes())  # noqa: S301 - written by `_extract`
    shelf, seconds = Shelf(Path("shelf"), "benchmark"), []
    for _ in range(RUNS):
        start = time.perf_counter()
        shelf.put(factors)
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "bytes": shelf.size()}


def _upload() -> Figures:
    api = HfApi()
    api.create_repo("bench/base")
    api.upload_folder(
        repo_id="bench/base", folder_path="base", allow_patterns=["config.json", "*.json", "*.safetensors"]
    )
    return {}


def _stream(revision: str) -> Figures:
    """Equal tensors of the base, read from the local Hub by ranges."""
    snapshot = fetch(
        Reference(repo="bench/base", revision=revision),
        memo=Path("digests.json"),
        progress=lambda *_: None,
        stream=True,
    )
    headers = {name: header for name, header in headers_of(snapshot).items() if name.startswith("model.equal.")}
    with reader_of(snapshot, headers) as reader:
        start = time.perf_counter()
        size = sum(reader.read(name).nbytes for name in headers)
    return {"seconds": time.perf_counter() - start, "bytes": size}


JOBS: dict[str, Callable[..., Figures]] = {
    "make": _make,
    "hash": _hash,
    "compare": _compare,
    "weigh": _weigh,
    "extract": _extract,
    "check": _check,
    "many": _many,
    "start": _start,
    "waiting": _waiting,
    "write": _write,
    "upload": _upload,
    "stream": _stream,
}

if __name__ == "__main__":
    main()
