"""The PEFT adapter that an export is made from, and compared with: read from its file, at one rank."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.headers import TensorHeader, file_headers
from publisher.checkpoints.reading import Reader, TensorReader
from publisher.records.extraction import KEY_PREFIX
from publisher.records.filenames import ADAPTER


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """A LoRA of this tool: the scaling is 1 in every module, and all of a file is in one dtype.

    Attributes:
        folder: where adapter_model.safetensors is.
        model_class: the class of transformers it is for.
        modules: their full names.
        rank: of the widest; the factors of narrower ones are padded to it with zeros, which changes no product.
        config: the base's config.json.
        headers: of adapter_model.safetensors.
    """

    folder: Path
    model_class: str
    modules: tuple[str, ...]
    rank: int
    config: Mapping[str, Any]
    headers: Mapping[str, TensorHeader]

    @classmethod
    def read(
        cls, folder: Path, model_class: str, *, modules: tuple[str, ...], rank: int, config: Mapping[str, Any]
    ) -> "PeftAdapter":
        """Read the headers of the adapter in this folder.

        Args:
            folder: where adapter_model.safetensors is.
            model_class: the class of transformers it is for.
            modules: their full names.
            rank: of the widest module.
            config: the base's config.json.

        Returns:
            The adapter; its factors are not read yet.

        Raises:
            FetchError: its file is missing or damaged.
        """
        return cls(folder, model_class, modules, rank, config=config, headers=file_headers(folder / ADAPTER))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every factor."""
        return torch_dtype(self._header(self.modules[0], "A"))

    def shape(self, module: str) -> tuple[int, int]:
        """Return (out, in), the shape of the module's weight."""
        return self._header(module, "B").shape[0], self._header(module, "A").shape[1]

    @contextmanager
    def factors(self) -> Iterator["FactorReader"]:
        """Open a reader of the factors for as long as the block runs."""
        with TensorReader(self.headers) as reader:
            yield FactorReader(reader, self.rank)

    def _header(self, module: str, half: str) -> TensorHeader:
        return self.headers[f"{KEY_PREFIX}{module}.lora_{half}.weight"]


@dataclass(frozen=True, slots=True)
class FactorReader:
    """Reads the factors of one module at a time, at one rank."""

    reader: Reader
    rank: int

    def a(self, module: str) -> torch.Tensor:
        """Return A (rank, in), in the file's dtype."""
        found = self.reader.read(f"{KEY_PREFIX}{module}.lora_A.weight")
        return torch.nn.functional.pad(found, (0, 0, 0, self.rank - found.shape[0]))

    def b(self, module: str) -> torch.Tensor:
        """Return B (out, rank), in the file's dtype."""
        found = self.reader.read(f"{KEY_PREFIX}{module}.lora_B.weight")
        return torch.nn.functional.pad(found, (0, self.rank - found.shape[1]))
