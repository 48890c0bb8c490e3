"""What the stages hand to each other, and the schema of the JSON artefacts.

Every record is frozen. Those named in an artefact hold no time, no host name and no path of this machine, and
their figures are rounded to six significant digits, so that equal work means equal bytes. No tensor ever enters
a record.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from publisher.errors import FetchError
from publisher.files import canonical_json, sha256_of, write_text

SCHEMA_VERSION: Literal[1] = 1


def six_digits(value: float) -> float:
    """A figure as artefacts have it."""
    return float(f"{value:.6g}")


Figure = Annotated[float, AfterValidator(six_digits)]
Shape = tuple[int, ...]


class Record(BaseModel):
    """Frozen, unknown fields refused; reads and writes canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> str:
        """Canonical JSON, one newline at the end."""
        return canonical_json(self.model_dump(mode="json"))

    def write(self, path: Path) -> None:
        """Write the canonical JSON atomically."""
        write_text(path, self.to_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a record back.

        Raises:
            FetchError: where the file is missing, damaged or of another schema.
        """
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise FetchError(f"{path} does not exist", next_step="run the stage that writes it") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise FetchError(
                f"{path}: {place}: {first['msg']}",
                expected=f"a {cls.__name__} of schema version {SCHEMA_VERSION}",
                next_step="delete the file and run the stage that writes it",
            ) from None


# --- fetch --------------------------------------------------------------------------------------------------


class FileDigest(Record):
    """One file of a checkpoint or of the staged tree; `name` is relative and uses forward slashes."""

    name: str
    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> Self:
        """Of this file as it is now, under its own name or another."""
        return cls(name=name or path.name, size=path.stat().st_size, sha256=sha256_of(path))


class Checkpoint(Record):
    """Which checkpoint: the repository id and commit, or a local folder's name and the digest of its files."""

    kind: Literal["hub", "local"]
    name: str
    revision: str
    files: tuple[FileDigest, ...]

    @property
    def short(self) -> str:
        """`name@` and the first eight digits of the revision."""
        return f"{self.name}@{self.revision[:8]}"


class Snapshot(Record):
    """A checkpoint as this machine has it. Never part of an artefact: it knows a local folder.

    `streamed`: only config.json and the index are in the folder; the weights stay on the Hub and are read there.
    """

    checkpoint: Checkpoint
    folder: Path
    streamed: bool = False


# --- extract ------------------------------------------------------------------------------------------------


PLATEAU = 0.999  # a share that exact recovery passes where nothing is wrong with rank and arithmetic


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

    arithmetic: Literal["one rounding", "update rounded first"]
    told_apart: bool
    other_share: Figure | None
    rank_shown: int
    svd_share: Figure
    float32_share: Figure
    share: Figure
    iterations: int
    ended: Literal["inside", "settled", "budget"]
    residual: int | None = None


class ModuleExtraction(Record):
    """What was found in one linear module, and how well its factors carry the update.

    Attributes:
        name: the module's full name, as in the checkpoint, without `.weight`.
        shape: (out, in) of the weight.
        rank: columns of B that carry the update; alpha equals the padded rank, so the scaling is always 1.
        alpha: lora_alpha of this module.
        method: `randomized svd` or `exact svd`.
        fit_error: |D - fit| / |D| of the rank-r fit in fp32, before the factors are rounded to their dtype.
        relative_error: |D - BA| / |D| with the factors as shipped.
        rounding_floor: |merge rounding| / |D| predicted from the source's own steps (docs/numerics.md).
        expected_error: the floor after a rank-r fit has absorbed its part, floor * sqrt((1 - r/m)(1 - r/n)).
        ratio: fit_error / expected_error; absent at full width, where nothing is left to compare.
        sigma_1: largest singular value of D.
        sigma_r: smallest one kept.
        sigma_next: the first one left out; absent at full width.
        noise_edge: largest singular value that rounding alone would give.
        update_rms: root mean square of D.
        exact_share: share of elements for which base + BA, rounded once, is the source bit for bit.
        unchanged_share: share of elements with the same value in base and source.
        rank_at_least: the smallest value kept stands in the noise, so the true rank may be higher.
        transposed: the weight is stored as (in, out), as transformers' Conv1D has it; `shape` is as stored.
        recovery: what the exact method reached; absent with the method svd.
    """

    name: str
    shape: tuple[int, int]
    rank: int
    alpha: int
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
    transposed: bool = False
    recovery: ExactRecovery | None = None


class LeftOut(Record):
    """A tensor that differs and is left out because the manifest says so.

    Attributes:
        name: the tensor.
        reason: how it differs.
        norm: Frobenius norm of its difference; absent where there is none to take, as between two shapes.
        share: of the squared norm of all differences; absent likewise.
    """

    name: str
    reason: str
    norm: Figure | None = None
    share: Figure | None = None


class Carried(Record):
    """A module whose tensors the adapter holds whole, as the source has them (PEFT's modules_to_save).

    Attributes:
        module: its full name.
        tensors: the tensors stored, all that the module has.
        tied: further modules of the class that share its weight and get the same tensors.
        parameters: elements stored for it, those of `tied` included.
        norm: Frobenius norm of source minus base.
        share: of the squared norm of all differences; absent until the summary knows them all.
    """

    module: str
    tensors: tuple[str, ...]
    tied: tuple[str, ...]
    parameters: int
    norm: Figure
    share: Figure | None = None


class Spread(Record):
    """Least, median and greatest of a figure over the modules."""

    min: Figure
    median: Figure
    max: Figure


class RankCount(Record):
    """How many modules have this rank, and what the last parts of their names are."""

    rank: int
    modules: int
    names: tuple[str, ...]


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
        exact_share: over all elements of all modules.
        update_rms: over the modules.
        recovery: what the exact method reached; absent with the method svd.
    """

    linears: int
    layers: str
    layers_total: int
    rank: int
    ranks: tuple[RankCount, ...]
    tensors_equal: int
    tensors_base_only: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    carried: tuple[Carried, ...] = ()
    fp8: tuple[str, ...] = ()
    parameters: int
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
        residual_elements: how many.
    """

    svd_share: Figure
    float32_share: Figure
    share: Figure
    modules: Spread
    arithmetic: dict[str, int]
    told_apart: int
    short: int
    rank_beyond: int
    residual: FileDigest | None = None
    residual_elements: int | None = None


class Energy(Record):
    """A rank by the share of the update's squared norm that each module's factors hold at least."""

    energy: float


class Settings(Record):
    """The adapter's settings, as the manifest gave them."""

    method: str
    rank: int | Literal["auto"] | Energy
    dtype: str
    layout: str
    task_type: str
    model_class: str
    ignore: tuple[str, ...]
    carry: tuple[str, ...] = ()
    residual: bool = False


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
    """extraction.json: one per variant, beside its adapter."""

    schema_version: Literal[1] = SCHEMA_VERSION
    path: str
    label: str
    source: Checkpoint
    base: Checkpoint
    settings: Settings
    tools: Tools
    summary: ExtractionSummary
    modules: tuple[ModuleExtraction, ...]


# --- validate -----------------------------------------------------------------------------------------------


class FunctionCheck(Record):
    """Logits of base + adapter against source and base on fixed token ids.

    Attributes:
        dtype: dtype of the forward passes.
        tokens: token ids per sequence and sequences: the logits compared are all of them.
        distance: |logits(base + adapter) - logits(source)|, Frobenius.
        base_distance: |logits(base) - logits(source)|, Frobenius.
        ratio: distance / base_distance; 0 is perfect, 1 means the adapter changes nothing.
        largest: largest absolute difference of one logit, base + adapter against source.
    """

    dtype: str
    tokens: tuple[int, int]
    distance: Figure
    base_distance: Figure
    ratio: Figure
    largest: Figure


class Validation(Record):
    """What validation saw, and the versions of the packages that judged. Local: it is part of no artefact."""

    path: str
    modules: int
    tensors: int
    largest_claim_difference: Figure
    function: FunctionCheck | None
    function_skipped: str | None
    packages: dict[str, str]


# --- verification (read by the card) ------------------------------------------------------------------------


class VerificationSet(Record):
    """One test set: base + adapter against the released model on the same requests."""

    name: str
    requests: int
    questions: int
    answers_changed: int
    answers_changed_share: Figure
    max_kl: Figure


class Verification(Record):
    """verification.json: one per variant, beside its adapter."""

    schema_version: Literal[1] = SCHEMA_VERSION
    path: str
    adapter_sha256: str
    sets: tuple[VerificationSet, ...]


# --- push ---------------------------------------------------------------------------------------------------


Change = Literal["added", "changed", "same", "deleted", "not compared"]


class Operation(Record):
    """One file of the commit; `size` is absent for a file that would be deleted."""

    path: str
    size: int | None
    sha256: str | None
    change: Change


class CommitPlan(Record):
    """The commit that push would make.

    Attributes:
        repo: where it would go.
        parent: the head it was compared with; absent for a new repository, or where none was reached.
        compared_with: the same in words.
        operations: every staged file, and every file of an earlier release that would go.
    """

    repo: str
    parent: str | None
    compared_with: str
    operations: tuple[Operation, ...]


class ReadBack(Record):
    """What was read back from the published commit, from an empty cache."""

    files: int
    adapters: int


Result = Literal["no changes", "committed", "pull request"]


class PushOutcome(Record):
    """What push did.

    Attributes:
        hub: the Hub's address; a rehearsal says `local Hub`.
        result: what happened on the Hub.
        commit: the commit that holds the release now.
        url: where it can be seen.
        tag: the tag that points to it.
        recovered: the answer to the commit was lost, and the commit was found by reading the repository again.
        read_back: what was read back from that commit.
    """

    hub: str
    result: Result
    commit: str
    url: str
    tag: str | None
    recovered: bool
    read_back: ReadBack | None


# --- the run ------------------------------------------------------------------------------------------------


class Marker(Record):
    """A finished stage: its result holds as long as the key and the files do."""

    key: str
    files: tuple[FileDigest, ...]


class VariantOutcome(Record):
    """One variant after a run; `reused` names the stages whose earlier result still held."""

    path: str
    label: str
    reused: tuple[str, ...]
    summary: ExtractionSummary | None
    validation: Validation | None


class Signing(Record):
    """The signature in the staged tree.

    Attributes:
        result: whether an earlier signature still held, one was made, or there is none.
        signer: who the manifest says must sign.
        why: why there is none.
    """

    result: Literal["kept", "signed", "missing"]
    signer: str
    why: str | None


class Outcome(Record):
    """What a run did; the document that `--json` prints."""

    manifest: str
    staged: str
    stages: tuple[str, ...]
    variants: tuple[VariantOutcome, ...]
    card_changed: bool | None
    signature: Signing | None
    plan: CommitPlan | None
    push: PushOutcome | None


# --- audit --------------------------------------------------------------------------------------------------


class Check(Record):
    """One check of an audit.

    Attributes:
        name: what is checked.
        variant: path of the variant it concerns; empty for the repository as a whole.
        status: `not checked` says in `detail` why not.
        detail: what was seen; of a failed check, what was found and what was expected, a line each.
    """

    name: str
    variant: str
    status: Literal["passed", "failed", "not checked"]
    detail: str


class Audit(Record):
    """Every check of one release; `revision` is absent for a local folder."""

    repo: str
    revision: str | None
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")
