"""Finished modules on disk, so that a run that was killed goes on where it stopped.

A module counts as finished once its figures are there and name the digest of the factors beside them: they are
written last. Whatever a kill, a full disk or a power cut left half done, or anything altered since, is made again.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from publisher.adapter import Factors
from publisher.errors import FetchError
from publisher.files import sha256_of
from publisher.records import ModuleExtraction, Record
from publisher.residual import Residual
from publisher.tensorfile import Planned, write_tensors


class _Kept(Record):
    """The figures of a finished module, and the SHA-256 of its factors' file."""

    figures: ModuleExtraction
    sha256: str


@dataclass(frozen=True, slots=True)
class Shelf:
    """The modules that were finished with the same inputs, settings, code and machine."""

    folder: Path

    def put(self, module: Factors) -> None:
        """Keep a finished module; when this returns it is safe on disk."""
        name = module.figures.name
        factors = self._factors(name)
        tensors = {"a": module.a, "b": module.b}
        if module.residual is not None:
            tensors |= {"index": module.residual.index, "value": module.residual.value}
        write_tensors(factors, {key: _planned(tensor) for key, tensor in tensors.items()})
        _Kept(figures=module.figures, sha256=sha256_of(factors)).write(self._figures(name))

    def figures(self, name: str) -> ModuleExtraction | None:
        """The figures of this module; None where it is not finished."""
        factors = self._factors(name)
        try:
            kept = _Kept.read(self._figures(name))
        except FetchError:  # absent or damaged
            return None
        return kept.figures if factors.is_file() and sha256_of(factors) == kept.sha256 else None

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def factors(self, figures: ModuleExtraction) -> Factors:
        """The factors of a finished module, from its figures."""
        b, a = self._tensors(figures, "b", "a")
        return Factors(b, a, figures)

    def residual(self, figures: ModuleExtraction) -> Residual:
        """What a merge of this finished module leaves to be set; it was asked for."""
        return Residual(*self._tensors(figures, "index", "value"))

    def _tensors(self, figures: ModuleExtraction, *keys: str) -> list[torch.Tensor]:
        with safe_open(self._factors(figures.name), framework="pt") as file:
            return [file.get_tensor(key) for key in keys]

    def _figures(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _factors(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def shelf(work: Path, key: str) -> Shelf:
    """The shelf of this key in the work folder; those of other keys are cleared away."""
    folder = work / f"modules-{key[:16]}"
    for other in work.glob("modules-*"):
        if other != folder:
            shutil.rmtree(other)
    return Shelf(folder)


def _planned(tensor: torch.Tensor) -> Planned:
    return Planned(tuple(tensor.shape), tensor.dtype, lambda: tensor)
