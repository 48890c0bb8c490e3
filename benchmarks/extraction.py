"""How fast, how exact and how large extraction is, on the linears of one layer of Qwen3.6-27B: `make bench`.

One pair of weights is made for each distinct shape of a DeltaNet and a full attention layer: bf16, with louder and
quieter rows and columns and heavy tails, and an update of rank 256 merged in. Each measurement then runs in a
process of its own, which reads the pair from disk as the extract stage does, so that its peak memory is its own:

- `svd`: `torch.linalg.svd` of the update, the yardstick;
- `decompose`: `publisher.numerics.svd.decompose` of the same update at rank 256, the fastest of three runs;
- `unit`: `extract_module`, everything that the extract stage does with one tensor pair.

The ratios count; seconds belong to the machine. `--quick` leaves out the full SVD, `--shapes` chooses some shapes.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from publisher.extraction.module import extract_module
from publisher.manifest.schema import AdapterSettings
from publisher.numerics.delta import delta_of
from publisher.numerics.svd import decompose

RANK = 256
LINEARS = {  # of Qwen3.6-27B, in a layer of either kind
    "mlp.gate_proj": (17408, 5120),
    "mlp.up_proj": (17408, 5120),
    "mlp.down_proj": (5120, 17408),
    "linear_attn.in_proj_qkv": (10240, 5120),
    "linear_attn.in_proj_z": (6144, 5120),
    "linear_attn.out_proj": (5120, 6144),
    "linear_attn.in_proj_a": (48, 5120),
    "linear_attn.in_proj_b": (48, 5120),
    "self_attn.q_proj": (12288, 5120),
    "self_attn.k_proj": (1024, 5120),
    "self_attn.v_proj": (1024, 5120),
    "self_attn.o_proj": (5120, 6144),
}
SETTINGS = AdapterSettings(method="svd", rank=RANK, dtype="bfloat16", layout="pattern", task_type="FEATURE_EXTRACTION")
HEADINGS = (
    "first linear",
    "shape",
    "svd s",
    "decompose s",
    "times faster",
    "residual / best",
    "unit s",
    "unit peak GiB",
)
WIDTHS = (23, 13, 7, 11, 12, 15, 7, 9)


def main() -> None:
    """Measure the chosen shapes one after the other and print a line for each."""
    arguments = _parser().parse_args()
    if arguments.measure:
        print(json.dumps(JOBS[arguments.measure](arguments.pair, LINEARS[arguments.shapes[0]])))
        return
    print(f"rank {RANK}, bfloat16, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(_row(HEADINGS))
    for name in arguments.shapes or first_of_each_shape(LINEARS):
        print(_row(_measured(name, quick=arguments.quick)), flush=True)


def first_of_each_shape(linears: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return one name for each distinct shape."""
    shapes = list(linears.values())
    return [name for index, (name, shape) in enumerate(linears.items()) if shapes.index(shape) == index]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--shapes", nargs="+", choices=LINEARS, metavar="NAME", help="only these, such as mlp.down_proj"
    )
    parser.add_argument("--quick", action="store_true", help="leave out the full SVD")
    parser.add_argument("--measure", choices=JOBS, help=argparse.SUPPRESS)  # how it calls itself
    parser.add_argument("--pair", type=Path, help=argparse.SUPPRESS)
    return parser


def _measured(name: str, *, quick: bool) -> tuple[str, ...]:
    with TemporaryDirectory() as folder:
        pair = Path(folder, "pair.safetensors")
        _in_own_process("make", pair, name)
        svd = None if quick else _in_own_process("svd", pair, name)
        decompose, unit = (_in_own_process(job, pair, name) for job in ("decompose", "unit"))
    shape = "{} x {}".format(*LINEARS[name])
    return (
        name,
        shape,
        f"{svd['seconds']:.2f}" if svd else "",
        f"{decompose['seconds']:.2f}",
        f"{svd['seconds'] / decompose['seconds']:.1f}" if svd else "",
        f"{decompose['residual'] / svd['residual']:.6f}" if svd and svd["residual"] else "",
        f"{unit['seconds']:.2f}",
        f"{unit['peak'] / 2**30:.2f}",
    )


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


# --- what runs in a process of its own ----------------------------------------------------------------------


def _in_own_process(job: str, pair: Path, name: str) -> dict[str, float]:
    """Run a job in a process of its own, the making of the pair too: a child's peak memory starts from its parent's."""
    command = [sys.executable, __file__, "--measure", job, "--pair", str(pair), "--shapes", name]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def make(pair: Path, shape: tuple[int, int]) -> dict[str, float]:
    """Write `base` and `source` of this shape into the file `pair`."""
    rows, columns = shape
    generator = torch.Generator().manual_seed(rows * columns)
    base = torch.randn(shape, generator=generator) / math.sqrt(columns)
    for side in ((rows, 1), (1, columns)):
        base *= 0.7 + 0.3 * torch.randn(side, generator=generator).square()
    base.mul_(torch.randn(shape, generator=generator).abs_().add_(0.5))  # heavier tails than a normal distribution's
    left, right = (torch.randn(size, generator=generator) for size in ((rows, RANK), (RANK, columns)))
    update = left @ right * (0.03 * float(base.square().mean().sqrt()) / math.sqrt(RANK))
    base = base.bfloat16()
    save_file({"base": base, "source": update.add_(base).bfloat16()}, pair)
    return {}


def _svd(pair: Path, _: tuple[int, int]) -> dict[str, float]:
    delta = _update(pair)
    seconds, (_, s, _) = _timed(lambda: torch.linalg.svd(delta, full_matrices=False))
    return {"seconds": seconds, "residual": float(s[RANK:].double().norm())}


def _decompose(pair: Path, _: tuple[int, int]) -> dict[str, float]:
    delta = _update(pair)
    runs = [_timed(lambda: decompose(delta, rank=RANK, threshold=0.0, name="update")) for _ in range(3)]
    return {"seconds": min(seconds for seconds, _ in runs), "residual": runs[0][1].misfit}


def _unit(pair: Path, _: tuple[int, int]) -> dict[str, float]:
    weights = load_file(pair)
    seconds, _ = _timed(
        lambda: extract_module("unit.weight", base=weights["base"], tuned=weights["source"], settings=SETTINGS)
    )
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "peak": kibibytes * 2**10}


def _update(pair: Path) -> torch.Tensor:
    weights = load_file(pair)
    return delta_of(base=weights["base"], tuned=weights["source"])


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    torch.linalg.svd(torch.ones(64, 64) @ torch.ones(64, 64))  # threads and libraries are up before the clock runs
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


JOBS = {"make": make, "svd": _svd, "decompose": _decompose, "unit": _unit}

if __name__ == "__main__":
    main()
