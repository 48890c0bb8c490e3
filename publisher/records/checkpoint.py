"""Which checkpoint: its name, its revision and the digest of each of its files."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, StringConstraints

from publisher.border.names import shortened
from publisher.border.paths import repository_path
from publisher.records.filenames import EXPORTS
from publisher.records.files import sha256_of
from publisher.records.record import Count, Each, Record, TensorName

# a record never names a file outside its own folder: it could lead a reader to any file of his machine
FileName = Annotated[str, AfterValidator(repository_path)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class FileDigest(Record):
    """One file of a checkpoint or of the staged tree; `name` is relative and uses forward slashes."""

    name: FileName
    size: Count
    sha256: Sha256

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> Self:
        """Return the digest of a file as it is now, under its own name or another."""
        return cls(name=name or path.name, size=path.stat().st_size, sha256=sha256_of(path))


def _export(file: FileDigest) -> FileDigest:
    if file.name not in _EXPORTED:
        raise ValueError(f"a file {shortened(file.name)}, which is none of {', '.join(sorted(_EXPORTED))}")
    return file


_EXPORTED = frozenset(name for names in EXPORTS.values() for name in names)
ExportFile = Annotated[FileDigest, AfterValidator(_export)]


class Checkpoint(Record):
    """Which checkpoint: the repository id and commit, or a local folder's name and the digest of its files."""

    kind: Literal["hub", "local"]
    name: str
    revision: str
    files: Each[FileDigest]

    @property
    def short(self) -> str:
        """`name@` and the first eight digits of the revision."""
        return f"{self.name}@{self.revision[:8]}"


Dtype = Literal["bfloat16", "float16", "float32"]


class Quantisation(Record):
    """A quantisation of bitsandbytes to 4 bits, in blocks of 64.

    Attributes:
        kind: the values that a code stands for: `nf4`, or `fp4`.
        double: the magnitudes of the blocks are quantised too, to 8 bits.
        dtype: of the weights that are quantised, and that they are dequantised to.
    """

    kind: Literal["nf4", "fp4"]
    double: bool
    dtype: Dtype


class QuantisedBase(Quantisation):
    """The quantisation of a base, and the weights that it is of."""

    tensors: Each[TensorName]

    @property
    def way(self) -> Quantisation:
        """The quantisation, without the weights."""
        return Quantisation(kind=self.kind, double=self.double, dtype=self.dtype)


class Snapshot(Record):
    """A checkpoint as this machine has it. Never part of an artefact: it knows a local folder.

    `streamed`: only config.json and the index are in the folder; the weights stay on the Hub and are read there.
    `quantised`: the quantisation in which its weights are read, of a base that a QLoRA was merged into.
    """

    checkpoint: Checkpoint
    folder: Path
    streamed: bool = False
    quantised: QuantisedBase | None = None
