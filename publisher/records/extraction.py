"""extraction.json: what was extracted from which checkpoints, and how close it comes, module by module."""

import math
import statistics
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from publisher.records.checkpoint import Checkpoint, Dtype, ExportFile, FileDigest, QuantisedBase, Snapshot
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


KEY_PREFIX = "base_model.model."  # the wrapped model sits at PeftModel.base_model.model

ModuleKind = Literal["linear", "embedding", "convolution"]

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


class MatrixFigures(Record):
    """What was found in one matrix of weights, and how well its factors carry the update.

    Attributes:
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
        exact_share: share of elements for which base + BA, merged by the arithmetic found, is the source bit for bit.
        unchanged_share: share of elements with the same value in base and source.
        rank_at_least: the smallest value kept stands in the noise, so the true rank may be higher.
        recovery: what the exact method reached; absent with the method svd.
        arithmetic: how the matrix was merged; absent for the usual way, the base in the source's dtype and PEFT's
            default roundings.
    """

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
    arithmetic: MergeArithmetic | None = Field(default=None, exclude_if=lambda found: found is None)


class ModuleFigures(MatrixFigures):
    """What was found in one module that has a matrix for its weight.

    Attributes:
        name: the module's full name, as in the checkpoint, without `.weight`.
        shape: (rows, columns) of the weight; of a convolution, all but the first extent are columns.
        spectrum: the singular values kept at `spectrum_places`; none in evidence from before there was a spectrum.
    """

    name: TensorName
    shape: tuple[Count, Count]
    # evidence of before there were any is written back as it was: an audit compares the bytes
    spectrum: Each[Figure] = Field(default=(), exclude_if=lambda values: not values)


def _sides(stored: tuple[int, int], *, transposed: bool) -> tuple[int, int]:
    rows, columns = stored
    return (columns, rows) if transposed else (rows, columns)


class ModuleExtraction(ModuleFigures):
    """One module as the adapter holds it: its figures, and its place in the adapter's layout.

    Attributes:
        alpha: lora_alpha of this module; it equals the padded rank, so the scaling is always 1.
        transposed: the weight is stored as (in, out), as transformers' Conv1D and tables have it; `shape` is as stored.
        kind: of the module: PEFT has other names and shapes for the factors of each.
        kernel: extents of a convolution's kernel, which `shape` has multiplied into its columns.
    """

    alpha: Count
    transposed: bool = False
    kind: ModuleKind = Field(default="linear", exclude_if=lambda kind: kind == "linear")
    kernel: Annotated[tuple[Count, ...], Field(max_length=3)] = Field(default=(), exclude_if=lambda kernel: not kernel)

    @model_validator(mode="after")
    def _has_its_kernel(self) -> Self:
        fits = math.prod(self.kernel) > 0 and self.shape[1] % math.prod(self.kernel) == 0
        if not fits or bool(self.kernel) != (self.kind == "convolution"):
            raise ValueError("a convolution, and nothing else, has a kernel, whose extents divide its columns")
        return self

    @property
    def sides(self) -> tuple[int, int]:
        """The (out, in) of the linear map, however its weight is stored."""
        return _sides(self.shape, transposed=self.transposed)

    @property
    def parameters(self) -> int:
        """Elements of A and B."""
        return self.alpha * sum(self.shape)

    @property
    def keys(self) -> tuple[str, str]:
        """The names of A and B in the adapter's file, as PEFT has them: those of a table have no `.weight`."""
        place = f"{KEY_PREFIX}{self.name}"
        if self.kind == "embedding":
            return f"{place}.lora_embedding_A", f"{place}.lora_embedding_B"
        return f"{place}.lora_A.weight", f"{place}.lora_B.weight"

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A (alpha, in) and B (out, alpha) in the adapter's file.

        PEFT splits a convolution in two: A has its kernel, and B one of width 1.
        """
        rows, columns = self.sides
        a = (self.alpha, columns // math.prod(self.kernel), *self.kernel)
        return a, (rows, self.alpha, *(1 for _ in self.kernel))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the weight in a checkpoint; of a convolution (out, in, *kernel)."""
        rows, columns = self.shape
        return (rows, columns // math.prod(self.kernel), *self.kernel)


class ExpertFigures(MatrixFigures):
    """What was found in the matrix of one expert that changed.

    Attributes:
        expert: its number, from 0; a parameter that is one matrix has the number 0 alone.
    """

    expert: Count


class ExpertTensorFigures(Record):
    """What was found in one parameter that holds a matrix for each expert.

    Attributes:
        name: the parameter's full name, such as `model.layers.0.mlp.experts.gate_up_proj`.
        shape: (experts, rows, columns) as the class has it, or (rows, columns) where it is one matrix.
        experts: those that changed, by their numbers.
    """

    name: TensorName
    shape: Annotated[tuple[Count, ...], Field(min_length=2, max_length=3)]
    experts: Each[ExpertFigures]

    @model_validator(mode="after")
    def _are_its_experts(self) -> Self:
        numbers = [-1, *(found.expert for found in self.experts), self.number]
        if any(before >= after for before, after in pairwise(numbers)):
            raise ValueError("experts are numbers that rise, each below the first of the shape's three extents")
        return self

    @property
    def number(self) -> int:
        """How many experts the parameter holds, changed or not."""
        return self.shape[0] if len(self.shape) > len(self.matrix) else 1

    @property
    def matrix(self) -> tuple[int, int]:
        """The rows and columns of one expert's matrix, as stored."""
        return self.shape[-2], self.shape[-1]

    @property
    def rank(self) -> int:
        """The largest rank that any expert needs; all of them share it in the adapter."""
        return max((found.rank for found in self.experts), default=0)


class ExpertTensor(ExpertTensorFigures):
    """One parameter of experts as the adapter holds it: its figures, and its place in the adapter's layout.

    Attributes:
        alpha: lora_alpha of this parameter; it equals the rank that each expert's factors are padded to.
        transposed: each matrix is stored as (in, out), as the class says by `is_transposed`.
        keys: the names of A and B in the adapter's file, as PEFT's wrapper of this parameter gives them.
    """

    alpha: Count
    transposed: bool
    keys: tuple[TensorName, TensorName]

    @property
    def sides(self) -> tuple[int, int]:
        """The (out, in) of each expert's linear map, however its matrix is stored."""
        return _sides(self.matrix, transposed=self.transposed)

    @property
    def parameters(self) -> int:
        """Elements of A and B, those of unchanged experts included."""
        return self.number * self.alpha * sum(self.matrix)

    def alone(self, found: ExpertFigures) -> ModuleExtraction:
        """Return one expert as the linear module that it is, named `NAME[3]`."""
        figures = found.model_dump(exclude={"expert"})
        name = f"{self.name}[{found.expert}]"
        return ModuleExtraction(**figures, name=name, shape=self.matrix, alpha=self.alpha, transposed=self.transposed)

    @property
    def together(self) -> ModuleExtraction:
        """All experts as one module, for charts and tables: root mean squares, and the values nearest to the noise.

        Errors are relative to the update of all of them, its root mean square is over all weights of the parameter,
        and shares are those of the experts that changed.
        """
        rows, columns = self.matrix
        nearest = min((one for one in self.experts if one.rank), key=lambda one: _over(one.sigma_r, one.noise_edge))
        fit, expected = (self._mean_square(field) ** 0.5 for field in ("fit_error", "expected_error"))
        return ModuleExtraction(
            name=self.name,
            shape=(self.number * rows, columns),
            rank=self.rank,
            alpha=self.alpha,
            transposed=self.transposed,
            method=nearest.method,
            fit_error=fit,
            relative_error=self._mean_square("relative_error") ** 0.5,
            rounding_floor=self._mean_square("rounding_floor") ** 0.5,
            expected_error=expected,
            ratio=fit / expected if expected else None,
            sigma_1=max(one.sigma_1 for one in self.experts),
            sigma_r=nearest.sigma_r,
            sigma_next=nearest.sigma_next,
            noise_edge=nearest.noise_edge,
            update_rms=(sum(one.update_rms**2 for one in self.experts) / self.number) ** 0.5,
            exact_share=statistics.fmean(one.exact_share for one in self.experts),
            unchanged_share=statistics.fmean(one.unchanged_share for one in self.experts),
            rank_at_least=any(one.rank_at_least for one in self.experts),
        )

    def _mean_square(self, field: str) -> float:
        """Return the mean of a relative figure's square, each expert counting by the square of its update."""
        weights = [one.update_rms**2 for one in self.experts]
        squares = [getattr(one, field) ** 2 for one in self.experts]
        return sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights) if any(weights) else 0.0


def _over(value: float, edge: float) -> float:
    return value / edge if edge else math.inf


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
        norm: Frobenius norm of tuned minus base; absent where the base has no such tensors, as of a new head.
    """

    module: TensorName
    tensors: Each[TensorName]
    tied: Each[TensorName]
    parameters: Count
    norm: Figure | None


class TokenRows(Record):
    """A table of which some rows differ: the adapter holds these, as the fine-tune has them.

    Attributes:
        module: the table's full name; PEFT's `trainable_token_indices` names it.
        rows: the numbers of the rows, which are token ids, in order.
        tied: further modules of the class that share the table and get the same rows.
        parameters: elements stored.
        norm: Frobenius norm of tuned minus base.
    """

    module: TensorName
    rows: Each[Count]
    tied: Each[TensorName]
    parameters: Count
    norm: Figure


class StoredRows(TokenRows):
    """Rows of a table that the adapter holds, and how much of the update that is.

    Attributes:
        share: of the squared norm of all differences.
    """

    share: Figure

    @classmethod
    def of(cls, rows: TokenRows, *, total: float) -> Self:
        """Return the entry of a table, where `total` is the squared norm of all differences."""
        return cls(
            module=rows.module,
            rows=rows.rows,
            tied=rows.tied,
            parameters=rows.parameters,
            norm=rows.norm,
            share=rows.norm**2 / total,
        )


class FactoredModule(Record):
    """A table or convolution that has factors of a LoRA because they are smaller than what is stored whole.

    Attributes:
        module: its full name.
        kind: what it is.
        rank: of its factors.
        parameters: elements of its factors.
        weights: elements that it has, which would be stored otherwise.
        share: of the squared norm of all differences.
    """

    module: TensorName
    kind: ModuleKind
    rank: Count
    parameters: Count
    weights: Count
    share: Figure

    @classmethod
    def of(cls, module: ModuleExtraction, *, total: float) -> Self:
        """Return the entry of a module, where `total` is the squared norm of all differences."""
        weights = math.prod(module.shape)
        return cls(
            module=module.name,
            kind=module.kind,
            rank=module.rank,
            parameters=module.parameters,
            weights=weights,
            share=module.update_rms**2 * weights / total,
        )


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
            share=None if saved.norm is None else saved.norm**2 / total,
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
    """The extraction in a few figures; everything here follows from `modules`, `experts` and the two headers.

    Figures over modules count the matrix of each changed expert as one.

    Attributes:
        linears: linear modules with an adapter.
        layers: the layers they are in, as ranges: `40-63`.
        layers_total: layers of the model, from the checkpoint's names.
        rank: the adapter's `r`.
        ranks: linear modules per rank, widest first.
        tensors_equal: tensors equal in base and source.
        tensors_base_only: names in the base alone (for example `mtp.*`).
        left_out: tensors that differ and that the manifest's `adapter.ignore` names.
        carried: modules that are stored whole: by the manifest's `adapter.carry`, or as the head of the task type.
        token_rows: tables of which the adapter holds some rows.
        factored: tables and convolutions that have factors, which are smaller than what is stored whole.
        labels: of that head, where the base's config.json says otherwise.
        fp8: the sides (`source`, `base`) whose changed weights are stored in FP8 with block scales.
        mxfp4: the sides whose changed experts are stored in MXFP4; absent where there is none.
        parameters: elements of A and B together.
        energy: share of the squared norm of the adapted modules' updates that the adapter holds.
        approximation: more is missing than the merge's rounding explains: the update has no such low rank.
        exact_share: share of the elements of all modules for which base + BA, merged by each module's arithmetic, is
            the source.
        update_rms: least, median and greatest over the modules.
        recovery: what the exact method reached; absent with the method svd.
        exports: the files of the formats that the manifest's `adapter.exports` names.
        base_quantisation: the quantisation of the base that the release was merged into, a QLoRA's; absent where it was
            merged into the base as it is.
        merge_arithmetic: how modules were merged that were not merged the usual way, and how many.
        experts: the parameters of experts; absent where the adapter has none.
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
    token_rows: Each[StoredRows] = Field(default=(), exclude_if=lambda rows: not rows)
    factored: Each[FactoredModule] = Field(default=(), exclude_if=lambda modules: not modules)
    labels: Count | None = Field(default=None, exclude_if=lambda labels: labels is None)
    fp8: Each[str] = ()
    mxfp4: Each[str] = Field(default=(), exclude_if=lambda sides: not sides)
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
    base_quantisation: QuantisedBase | None = Field(default=None, exclude_if=lambda found: found is None)
    merge_arithmetic: Each[CountedArithmetic] = Field(default=(), exclude_if=lambda found: not found)
    experts: "ExpertSummary | None" = Field(default=None, exclude_if=lambda found: found is None)

    @property
    def written(self) -> dict[str, FileDigest]:
        """The adapter's files, by the name that each must have."""
        residual = {RESIDUAL: self.recovery.residual} if self.recovery and self.recovery.residual else {}
        return (
            {ADAPTER: self.adapter, ADAPTER_CONFIG: self.config} | residual | {file.name: file for file in self.exports}
        )


class ExpertSummary(Record):
    """The experts of an adapter in a few figures.

    Attributes:
        tensors: parameters that PEFT adapts by `target_parameters`.
        single: those of them that are one matrix, such as a router.
        matrices: in all of them, one for each expert.
        changed: those that differ between base and source.
        silent: those of them that stay within rounding noise and have no factors.
        rank: least, median and greatest over the changed ones that have factors.
        relative_error: the same of |D - BA| / |D|.
        share: of the squared norm of all differences.
        parameters: elements of A and B.
        weights: elements of the matrices that changed.
    """

    tensors: Count
    single: Count
    matrices: Count
    changed: Count
    silent: Count
    rank: Spread
    relative_error: Spread
    share: Figure
    parameters: Count
    weights: Count


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
    task_type: str | None
    model_class: str
    ignore: Each[str]
    carry: tuple[str, ...] | Literal["auto"] = ()
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

    `experts` are parameters that PEFT adapts by `target_parameters`; evidence of a model without has no such field.

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
    experts: Each[ExpertTensor] = Field(default=(), exclude_if=lambda found: not found)
    # evidence that has some is written back as it was: an audit compares the bytes
    loaders: Each[LoaderVerdict] = Field(default=(), exclude_if=lambda verdicts: not verdicts)

    @property
    def places(self) -> tuple[ModuleExtraction, ...]:
        """All that the adapter changes, for charts and tables: its modules, and each parameter of experts as one."""
        return (*self.modules, *(tensor.together for tensor in self.experts if tensor.rank))

    def as_merged(self, base: Snapshot) -> Snapshot:
        """Return the base as it was in the release's merge: its weights are read in the quantisation found."""
        return base.model_copy(update={"quantised": self.summary.base_quantisation})
