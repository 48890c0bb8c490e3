"""extraction.json: what was extracted from which checkpoints, and how close it comes, module by module."""

from typing import Literal, Self

from pydantic import Field

from publisher.records.checkpoint import Checkpoint, ExportFile, FileDigest
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG, RESIDUAL
from publisher.records.loaders import LoaderVerdict
from publisher.records.record import SCHEMA_VERSION, Count, Each, Figure, Record, TensorName

APPROXIMATE = 3.0  # times what rounding leaves; a merge that rounded twice gives up to 2.5 (docs/numerics.md)
SPECTRUM = 32  # singular values of a module that its evidence holds, at most
PLATEAU = 0.999  # a share that exact recovery passes where nothing is wrong with rank and arithmetic


def spectrum_places(rank: int) -> tuple[int, ...]:
    """Return which of a module's `rank` singular values its evidence holds, counted from 1.

    There are at most 32 of them, evenly spaced, the first and the last among them.
    """
    steps = min(rank, SPECTRUM) - 1
    return tuple(1 + step * (rank - 1) // steps for step in range(steps + 1)) if steps > 0 else (1,)[:rank]


Dtype = Literal["bfloat16", "float16", "float32"]
Roundings = Literal["one rounding", "update rounded first"]


class MergeArithmetic(Record):
    """How a module was merged, where it was not the usual way: base in the source's dtype, and one rounding.

    Attributes:
        merged_in: the dtype that the base had when the update was added, in which users load it for the same result.
        rounded_to: the dtype that the sum was rounded to; the source may be stored in a longer one.
        roundings: of the sum alone, or of the update to `rounded_to` before.
    """

    merged_in: Dtype
    rounded_to: Dtype
    roundings: Roundings = "one rounding"


class CountedArithmetic(MergeArithmetic):
    """An arithmetic, and how many modules were merged by it."""

    modules: Count


class ExactRecovery(Record):
    """How far a module's factors merge back to the released weight (`adapter.method: exact`).

    Attributes:
        arithmetic: how the release was merged, as far as can be inferred: base + update rounded once, or with the
            update rounded to the source's dtype before.
        told_apart: the two would show: in what a fit leaves, or in the share that each reaches.
        other_share: share reached with the other arithmetic, where it was tried.
        rank_shown: singular values of the update above the noise edge, among those kept.
        svd_share: share of elements that the truncated SVD restores, in float32.
        float32_share: share that the recovered factors restore, in float32.
        share: the same of the factors as shipped, in the adapter's dtype.
        iterations: that it took.
        ended: `inside`, with every element in its interval; `settled`, with nothing gained any more; or `budget`.
        residual: elements in the residual file; absent where none was asked for.
    """

    arithmetic: Roundings
    told_apart: bool
    other_share: Figure | None
    rank_shown: Count
    svd_share: Figure
    float32_share: Figure
    share: Figure
    iterations: Count
    ended: Literal["inside", "settled", "budget"]
    residual: Count | None = None


class ModuleFigures(Record):
    """What was found in one linear module, and how well its factors carry the update.

    Attributes:
        name: the module's full name, as in the checkpoint, without `.weight`.
        shape: (out, in) of the weight.
        rank: columns of B that carry the update.
        method: `randomized svd` or `exact svd`.
        fit_error: |D - fit| / |D| of the rank-r fit in fp32, before the factors are rounded to their dtype.
        relative_error: |D - BA| / |D| with the factors as shipped.
        rounding_floor: |merge rounding| / |D| predicted from the source's own steps (docs/numerics.md).
        expected_error: the floor after a rank-r fit has absorbed its part, floor * sqrt((1 - r/m)(1 - r/n)).
        ratio: fit_error / expected_error; absent at full width, where nothing is left to compare.
        sigma_1: largest singular value of D.
        sigma_r: smallest one kept.
        sigma_next: the first one left out; absent at full width.
        noise_edge: the spectral noise threshold: largest singular value that rounding alone would give.
        update_rms: root mean square of D.
        exact_share: share of elements for which base + BA, merged by the module's arithmetic, is the source bit for
            bit.
        unchanged_share: share of elements with the same value in base and source.
        rank_at_least: the smallest value kept stands in the noise, so the true rank may be higher.
        recovery: what the exact method reached; absent with the method svd.
        spectrum: the singular values kept at `spectrum_places`; none in evidence from before there was a spectrum.
        arithmetic: how the module was merged; absent for the usual way, the base in the source's dtype and one
            rounding.
    """

    name: TensorName
    shape: tuple[Count, Count]
    rank: Count
    method: Literal["randomized svd", "exact svd"]
    fit_error: Figure
    relative_error: Figure
    rounding_floor: Figure
    expected_error: Figure
    ratio: Figure | None
    sigma_1: Figure
    sigma_r: Figure
    sigma_next: Figure | None
    noise_edge: Figure
    update_rms: Figure
    exact_share: Figure
    unchanged_share: Figure
    rank_at_least: bool
    recovery: ExactRecovery | None = None
    # evidence of before there were any is written back as it was: an audit compares the bytes
    spectrum: Each[Figure] = Field(default=(), exclude_if=lambda values: not values)
    arithmetic: MergeArithmetic | None = Field(default=None, exclude_if=lambda found: found is None)


class ModuleExtraction(ModuleFigures):
    """One linear module as the adapter holds it: its figures, and its place in the adapter's layout.

    Attributes:
        alpha: lora_alpha of this module; it equals the padded rank, so the scaling is always 1.
        transposed: the weight is stored as (in, out), as transformers' Conv1D has it; `shape` is as stored.
    """

    alpha: Count
    transposed: bool = False

    @classmethod
    def of(cls, figures: ModuleFigures, *, alpha: int, transposed: bool) -> Self:
        """Return a module with these figures.

        Args:
            figures: what was found in the module.
            alpha: its lora_alpha, which its factors are padded to.
            transposed: whether its weight is stored as (in, out).

        Returns:
            The module's entry in extraction.json.
        """
        return cls(**dict(figures), alpha=alpha, transposed=transposed)


class DifferentTensor(Record):
    """A tensor that differs and that the manifest's `adapter.ignore` names.

    Attributes:
        name: the tensor.
        reason: how it differs.
        norm: Frobenius norm of its difference; absent where there is none to take, as between two shapes.
    """

    name: TensorName
    reason: str
    norm: Figure | None = None


class LeftOut(DifferentTensor):
    """A tensor that the adapter leaves out, and how much of the update that is.

    Attributes:
        share: of the squared norm of all differences; absent where the tensor has no norm.
    """

    share: Figure | None = None

    @classmethod
    def of(cls, tensor: DifferentTensor, *, total: float) -> Self:
        """Return the entry of a tensor, where `total` is the squared norm of all differences."""
        share = None if tensor.norm is None else tensor.norm**2 / total
        return cls(name=tensor.name, reason=tensor.reason, norm=tensor.norm, share=share)


class SavedModule(Record):
    """A module whose tensors the adapter holds whole, as the fine-tune has them (PEFT's modules_to_save).

    Attributes:
        module: its full name.
        tensors: the tensors stored, all that the module has.
        tied: further modules of the class that share its weight and get the same tensors.
        parameters: elements stored for it, those of `tied` included.
        norm: Frobenius norm of tuned minus base.
    """

    module: TensorName
    tensors: Each[TensorName]
    tied: Each[TensorName]
    parameters: Count
    norm: Figure


class Carried(SavedModule):
    """A module that the adapter holds whole, and how much of the update that is.

    Attributes:
        share: of the squared norm of all differences.
    """

    share: Figure | None = None

    @classmethod
    def of(cls, saved: SavedModule, *, total: float) -> Self:
        """Return the entry of a module, where `total` is the squared norm of all differences."""
        return cls(
            module=saved.module,
            tensors=saved.tensors,
            tied=saved.tied,
            parameters=saved.parameters,
            norm=saved.norm,
            share=saved.norm**2 / total,
        )


class Spread(Record):
    """Least, median and greatest of a figure over the modules."""

    min: Figure
    median: Figure
    max: Figure


class RankCount(Record):
    """How many modules have this rank, and what the last parts of their names are."""

    rank: Count
    modules: Count
    names: Each[str]


class ExtractionSummary(Record):
    """The extraction in a few figures; everything here follows from `modules` and the two headers.

    Attributes:
        linears: modules with an adapter.
        layers: the layers they are in, as ranges: `40-63`.
        layers_total: layers of the model, from the checkpoint's names.
        rank: the adapter's `r`.
        ranks: modules per rank, widest first.
        tensors_equal: tensors equal in base and source.
        tensors_base_only: names in the base alone (for example `mtp.*`).
        left_out: tensors that differ and that the manifest's `adapter.ignore` names.
        carried: modules that the manifest's `adapter.carry` names, stored whole.
        fp8: the sides (`source`, `base`) whose changed weights are stored in FP8 with block scales.
        parameters: elements of A and B together.
        energy: share of the squared norm of the adapted modules' updates that the adapter holds.
        approximation: more is missing than the merge's rounding explains: the update has no such low rank.
        exact_share: share of the elements of all modules for which base + BA, merged by each module's arithmetic, is
            the source.
        update_rms: least, median and greatest over the modules.
        recovery: what the exact method reached; absent with the method svd.
        exports: the files of the formats that the manifest's `adapter.exports` names.
        merge_arithmetic: how modules were merged that were not merged the usual way, and how many.
    """

    linears: Count
    layers: str
    layers_total: Count
    rank: Count
    ranks: Each[RankCount]
    tensors_equal: Count
    tensors_base_only: Each[str]
    left_out: Each[LeftOut]
    carried: Each[Carried] = ()
    fp8: Each[str] = ()
    parameters: Count
    adapter: FileDigest
    config: FileDigest
    relative_error: Spread
    fit_error: Spread
    rounding_floor: Spread
    ratio: Spread | None
    update_rms: Spread
    energy: Figure
    approximation: bool
    exact_share: Figure
    exact_share_modules: Spread
    recovery: "RecoverySummary | None" = None
    exports: Each[ExportFile] = ()
    merge_arithmetic: Each[CountedArithmetic] = Field(default=(), exclude_if=lambda found: not found)

    @property
    def written(self) -> dict[str, FileDigest]:
        """The adapter's files, by the name that each must have."""
        residual = {RESIDUAL: self.recovery.residual} if self.recovery and self.recovery.residual else {}
        return (
            {ADAPTER: self.adapter, ADAPTER_CONFIG: self.config} | residual | {file.name: file for file in self.exports}
        )


class RecoverySummary(Record):
    """The exact method's figures over all modules.

    Attributes:
        svd_share: over all elements, what the truncated SVD restores in float32.
        float32_share: what the recovered factors restore in float32.
        share: what they restore as shipped, by the arithmetic found for each module.
        modules: shares of the modules in float32.
        arithmetic: modules for each way in which the release may have been merged.
        told_apart: modules in which the other way would have shown.
        short: modules that stopped below a share that a sufficient rank would reach.
        rank_beyond: modules whose rank is more than what stands above the noise.
        residual: the file of the elements that still differ, and how many it holds; absent where none was asked for.
        residual_elements: how many elements that file holds.
    """

    svd_share: Figure
    float32_share: Figure
    share: Figure
    modules: Spread
    arithmetic: dict[str, Count]
    told_apart: Count
    short: Count
    rank_beyond: Count
    residual: FileDigest | None = None
    residual_elements: Count | None = None


class Energy(Record):
    """A rank by the share of the update's squared norm that each module's factors hold at least."""

    energy: float


class Settings(Record):
    """The adapter's settings, as the manifest gave them."""

    method: str
    rank: Count | Literal["auto"] | Energy
    dtype: str
    layout: str
    task_type: str
    model_class: str
    ignore: Each[str]
    carry: Each[str] = ()
    residual: bool = False
    exports: Each[str] = ()


class Tools(Record):
    """What made an artefact.

    Attributes:
        publisher: version of this tool.
        commit: its commit, where it runs from a checkout or was installed from one.
        dirty: whether that checkout held uncommitted changes; absent where there is none.
        code: digest of the sources that decide the bytes.
        device: `cpu`, or the accelerator's name.
        packages: versions that decide the bytes.
    """

    publisher: str
    commit: str | None
    dirty: bool | None
    code: str
    device: str
    packages: dict[str, str]


class Extraction(Record):
    """extraction.json: one per variant, beside its adapter.

    `loaders` stands in releases from before there was a loaders.json. It is read, and no longer written: an
    empty one is left out.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    path: str
    label: str
    source: Checkpoint
    base: Checkpoint
    settings: Settings
    tools: Tools
    summary: ExtractionSummary
    modules: Each[ModuleExtraction]
    # evidence that has some is written back as it was: an audit compares the bytes
    loaders: Each[LoaderVerdict] = Field(default=(), exclude_if=lambda verdicts: not verdicts)
