"""Finished modules on disk, so that a run that was killed goes on where it stopped.

A module counts as finished once its figures are there: they are written last, name the digest of the factors beside
them, and have one of their own. Both are checked whenever they are read. Whatever a kill, a full disk or a power cut
left half done, or anything altered since, is made again. A tensor's name is in the file, never its name.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load

from publisher.adapters.parameters import ExpertFactors
from publisher.adapters.peft_files import Factors
from publisher.adapters.residual import Residual
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.errors import ExtractionError
from publisher.records.extraction import ExpertTensorFigures, ModuleFigures
from publisher.records.files import sha256_of
from publisher.records.record import Record
from publisher.records.sealed import kept_file, read_sealed, write_sealed


class _Kept(Record):
    """The figures of a finished module or parameter, what it rests on, and the SHA-256 of its factors' file."""

    key: str
    figures: ModuleFigures | ExpertTensorFigures
    sha256: str


@dataclass(frozen=True, slots=True)
class ModuleCache:
    """The modules that were finished with the same inputs, settings, code and machine; `key` is the digest of these."""

    folder: Path
    key: str

    def put(self, module: Factors | ExpertFactors) -> None:
        """Keep a finished module or parameter of experts; when this returns it is safe on disk."""
        name = module.figures.name
        factors = self._factors(name)
        tensors = {"a": module.a, "b": module.b}
        if isinstance(module, Factors) and module.residual is not None:
            tensors |= {"index": module.residual.index, "value": module.residual.value}
        write_tensors(factors, {key: _planned(tensor) for key, tensor in tensors.items()})
        write_sealed(self._figures(name), _Kept(key=self.key, figures=module.figures, sha256=sha256_of(factors)))

    def has_files_of(self, name: str) -> bool:
        """Return whether anything is kept of this module, be it whole or not."""
        return self._figures(name).exists() or self._factors(name).exists()

    def figures(self, name: str) -> ModuleFigures | None:
        """Return the figures of this module; None where it is not finished, or its files were changed since."""
        figures = self._whole(name)
        return figures if isinstance(figures, ModuleFigures) else None

    def expert_figures(self, name: str) -> ExpertTensorFigures | None:
        """Return the figures of this parameter of experts; None where it is not finished, or its files were changed."""
        figures = self._whole(name)
        return figures if isinstance(figures, ExpertTensorFigures) else None

    def _whole(self, name: str) -> ModuleFigures | ExpertTensorFigures | None:
        kept, factors = self._kept(name), self._factors(name)
        whole = kept is not None and factors.is_file() and sha256_of(factors) == kept.sha256
        return kept.figures if kept is not None and whole else None

    def size(self) -> int:
        """Return the bytes that the factors take on disk."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def factors(self, figures: ModuleFigures) -> Factors:
        """Return the factors of a finished module, from its figures.

        Raises:
            ExtractionError: its files were changed after the figures were read.
        """
        b, a = self._tensors(figures, "b", "a")
        return Factors(b, a, figures)

    def expert_factors(self, figures: ExpertTensorFigures) -> ExpertFactors:
        """Return the factors of a finished parameter of experts, from its figures.

        Raises:
            ExtractionError: its files were changed after the figures were read.
        """
        b, a = self._tensors(figures, "b", "a")
        return ExpertFactors(b, a, figures)

    def residual(self, figures: ModuleFigures) -> Residual:
        """Return what a merge of this finished module leaves to be set, where the settings asked for it.

        Raises:
            ExtractionError: its files were changed after the figures were read.
        """
        return Residual(*self._tensors(figures, "index", "value"))

    def _tensors(self, figures: ModuleFigures | ExpertTensorFigures, *keys: str) -> list[torch.Tensor]:
        """Read the file once, so that the bytes whose digest holds are those that are used."""
        kept, file = self._kept(figures.name), self._factors(figures.name)
        octets = file.read_bytes() if file.is_file() else b""
        if kept is None or hashlib.sha256(octets).hexdigest() != kept.sha256:
            raise ExtractionError(
                f"what is kept of {figures.name} in {self.folder} was changed while this run was at work",
                expected="the factors that this run has checked or made",
                next_step="run the same command again: that module is made again",
            )
        tensors = load(octets)
        return [tensors[key] for key in keys]

    def _kept(self, name: str) -> _Kept | None:
        kept = read_sealed(self._figures(name), _Kept)
        return kept if kept is not None and (kept.key, kept.figures.name) == (self.key, name) else None

    def _figures(self, name: str) -> Path:
        return kept_file(self.folder, name, suffix=".json")

    def _factors(self, name: str) -> Path:
        return kept_file(self.folder, name, suffix=".safetensors")


def open_module_cache(work: Path, key: str) -> ModuleCache:
    """Return the modules of this key in the work folder, and clear those of other keys away."""
    folder = work / f"modules-{key[:16]}"
    for other in work.glob("modules-*"):
        if other != folder:
            shutil.rmtree(other)
    return ModuleCache(folder, key)


def _planned(tensor: torch.Tensor) -> Planned:
    return Planned(tuple(tensor.shape), tensor.dtype, lambda: tensor)
