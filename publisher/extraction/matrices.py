"""All matrices that an adapter has factors for: those of linear modules, and one of each expert that changed."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from publisher.records.extraction import ExpertTensorFigures, MatrixFigures, ModuleFigures


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix: what was found in it, and its (rows, columns) as stored."""

    figures: MatrixFigures
    shape: tuple[int, int]

    @property
    def elements(self) -> int:
        """How many weights it has."""
        return math.prod(self.shape)

    @property
    def update(self) -> float:
        """The squared norm of its delta."""
        return self.figures.update_rms**2 * self.elements


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a weight of this shape, all but its first extent taken together."""
    return shape[0], math.prod(shape[1:])


def widest_rank(modules: Iterable[ModuleFigures], experts: Iterable[ExpertTensorFigures] = ()) -> int:
    """Return the largest rank of these modules and parameters: the adapter's `r`."""
    return max(fit.figures.rank for fit in matrices(modules, experts))


def matrices(modules: Iterable[ModuleFigures], experts: Iterable[ExpertTensorFigures] = ()) -> tuple[Matrix, ...]:
    """Return the matrices of these modules and of the changed experts of these parameters."""
    of_modules = (Matrix(module, module.shape) for module in modules)
    return (*of_modules, *(Matrix(found, tensor.matrix) for tensor in experts for found in tensor.experts))
