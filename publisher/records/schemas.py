"""What the stages hand to each other, and the schema of the JSON artefacts.

Every record is frozen. Those named in an artefact hold no time, no host name and no path of this machine, and
their figures are rounded to six significant digits, so that equal work means equal bytes. No tensor ever enters
a record.
"""

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
)

from publisher.border.escape import for_terminal
from publisher.border.files import read_regular
from publisher.border.json_text import parse_json
from publisher.border.limits import LIMITS
from publisher.border.names import shortened, tensor_name
from publisher.border.paths import repository_path
from publisher.errors import FetchError
from publisher.records.filenames import ADAPTER, CONFIG, EXPORTS, RESIDUAL
from publisher.records.files import canonical_json, sha256_of, write_text

SCHEMA_VERSION: Literal[1] = 1
_PARTS, _PART = 8, 80  # of a place in a message, and characters of each


def six_digits(value: float) -> float:
    """A figure as artefacts have it."""
    return float(f"{value:.6g}")


_T = TypeVar("_T")
_LARGEST = 1e30  # of a figure: whatever is drawn or divided stays finite

Figure = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), AfterValidator(six_digits)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
TensorName = Annotated[str, AfterValidator(tensor_name)]
Each = Annotated[tuple[_T, ...], FailFast()]  # the first that is wrong ends it: millions of complaints fill the memory
Shape = tuple[int, ...]


class Record(BaseModel):
    """Frozen, unknown fields refused; reads and writes canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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
            FetchError: where the file is missing, damaged, no regular file, or of another schema.
        """
        try:
            return cls.model_validate(parse_json(read_regular(path, limit=LIMITS.json_bytes)))
        except FileNotFoundError:
            raise FetchError(f"{path} does not exist", next_step="run the stage that writes it") from None
        except OSError as error:
            raise FetchError(f"{path} cannot be read: {error.strerror}", next_step="name another folder") from None
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = for_terminal(".".join(str(part)[:_PART] for part in first["loc"][:_PARTS])) or "the file"
            raise FetchError(
                f"{path}: {place}: {for_terminal(first['msg'])}",
                expected=f"a {cls.__name__} of schema version {SCHEMA_VERSION}",
                next_step="delete the file and run the stage that writes it",
            ) from None
        except ValueError as error:
            raise FetchError(
                f"{path}: {error}", expected="JSON as this tool writes it", next_step="run the stage that writes it"
            ) from None


# --- fetch --------------------------------------------------------------------------------------------------


def _release_file(name: str) -> str:
    """A record never names a file outside its own folder: whoever reads it could be led to any file of his machine."""
    return repository_path(name)


FileName = Annotated[str, AfterValidator(_release_file)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class FileDigest(Record):
    """One file of a checkpoint or of the staged tree; `name` is relative and uses forward slashes."""

    name: FileName
    size: Count
    sha256: Sha256

    @classmethod
    def of(cls, path: Path, *, name: str | None = None) -> Self:
        """Of this file as it is now, under its own name or another."""
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


class Snapshot(Record):
    """A checkpoint as this machine has it. Never part of an artefact: it knows a local folder.

    `streamed`: only config.json and the index are in the folder; the weights stay on the Hub and are read there.
    """

    checkpoint: Checkpoint
    folder: Path
    streamed: bool = False


# --- extract ------------------------------------------------------------------------------------------------


APPROXIMATE = 3.0  # times what rounding leaves; a merge that rounded twice gives up to 2.5 (docs/numerics.md)
SPECTRUM = 32  # singular values of a module that its evidence holds, at most
PLATEAU = 0.999  # a share that exact recovery passes where nothing is wrong with rank and arithmetic


def spectrum_places(rank: int) -> tuple[int, ...]:
    """Which of a module's `rank` singular values its evidence holds, counted from 1.

    At most 32, evenly spaced, the first and the last among them.
    """
    steps = min(rank, SPECTRUM) - 1
    return tuple(1 + step * (rank - 1) // steps for step in range(steps + 1)) if steps > 0 else (1,)[:rank]


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
    rank_shown: Count
    svd_share: Figure
    float32_share: Figure
    share: Figure
    iterations: Count
    ended: Literal["inside", "settled", "budget"]
    residual: Count | None = None


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
        spectrum: of the singular values kept, those at `spectrum_places`; none in evidence of before there were any.
    """

    name: TensorName
    shape: tuple[Count, Count]
    rank: Count
    alpha: Count
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
    # evidence of before there were any is written back as it was: an audit compares the bytes
    spectrum: Each[Figure] = Field(default=(), exclude_if=lambda values: not values)


class LeftOut(Record):
    """A tensor that differs and is left out because the manifest says so.

    Attributes:
        name: the tensor.
        reason: how it differs.
        norm: Frobenius norm of its difference; absent where there is none to take, as between two shapes.
        share: of the squared norm of all differences; absent likewise.
    """

    name: TensorName
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

    module: TensorName
    tensors: Each[TensorName]
    tied: Each[TensorName]
    parameters: Count
    norm: Figure
    share: Figure | None = None


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
        exact_share: over all elements of all modules.
        update_rms: over the modules.
        recovery: what the exact method reached; absent with the method svd.
        exports: the files of the formats that the manifest's `adapter.exports` names.
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

    @property
    def written(self) -> dict[str, FileDigest]:
        """The adapter's files, by the name that each must have."""
        residual = {RESIDUAL: self.recovery.residual} if self.recovery and self.recovery.residual else {}
        return {ADAPTER: self.adapter, CONFIG: self.config} | residual | {file.name: file for file in self.exports}


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


LoaderName = Literal["PEFT", "transformers", "vLLM", "SGLang", "llama.cpp", "MLX"]
Basis = Literal["executed", "reader executed", "read"]
FindingKind = Literal[
    "missing module",
    "missing tensor",
    "other format",
    "rank limit",
    "refused field",
    "refused tensor",
    "silent no-op",
    "unreadable",
    "unsupported model",
    "wrong scale",
]


class LoaderFinding(Record):
    """What keeps a loader from using an adapter as it is meant.

    Attributes:
        kind: of what sort it is.
        what: the same in words.
        modules: how many modules or tensors it concerns; 0 where it is the adapter as a whole.
        silent: the loader goes on without an error, at most with a line in a log.
        remedy: what helps.
    """

    kind: FindingKind
    what: str
    modules: Count
    silent: bool
    remedy: str


class LoaderVerdict(Record):
    """Whether a loader takes an adapter.

    Attributes:
        loader: which.
        version: whose rules were followed.
        basis: `executed`: the loader was run, without weights of the base; `reader executed`: its reader of
            adapter_config.json was, and the rest was read; `read`: its source was.
        loads: `wrongly`: without an error, but not as it is meant; `not told`: nothing speaks against it, and the
            rules that were read do not cover this model.
        scale: of the modules; `none` where the loader does not come as far.
        flags: what it takes to load it there.
        findings: what speaks against it; none where it loads.
        notes: when it would be otherwise.
    """

    loader: LoaderName
    version: str
    basis: Basis
    loads: Literal["yes", "no", "wrongly", "not told"]
    scale: Literal["right", "wrong", "none", "not told"]
    flags: Each[str]
    findings: Each[LoaderFinding]
    notes: Each[str]


class Extraction(Record):
    """extraction.json: one per variant, beside its adapter.

    `loaders` is added once the adapter has passed validation. It is absent before, and in releases from before there
    was such a thing: an empty one is not written.
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
    # likewise written back as it was
    loaders: Each[LoaderVerdict] = Field(default=(), exclude_if=lambda verdicts: not verdicts)


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
    modules: Count
    tensors: Count
    largest_claim_difference: Figure
    function: FunctionCheck | None
    function_skipped: str | None
    packages: dict[str, str]


# --- verification -------------------------------------------------------------------------------------------

Kind = Literal["noul", "choice", "score", "token"]
Side = Literal["reference", "candidate"]


class Agreement(Record):
    """How two models' distributions over the same options differ; divergences in nats.

    Attributes:
        questions: those that both answered; every figure here is over these.
        answers_changed: questions whose most probable option is another one; the first of several equal ones counts.
        answers_changed_share: of `questions`.
        ties: questions where a model's most probable option has an equal beside it.
        max_kl: largest KL(reference || candidate).
        mean_kl: its mean.
        p99_kl: its 99th percentile, interpolated between neighbours.
        max_probability_difference: of one option, over all options and questions.
    """

    questions: Count
    answers_changed: Count
    answers_changed_share: Figure
    ties: Count
    max_kl: Figure
    mean_kl: Figure
    p99_kl: Figure
    max_probability_difference: Figure


class KindAgreement(Agreement):
    """The same for one type of question."""

    kind: Kind


class Failure(Record):
    """Questions that one side did not answer, for one reason."""

    side: Side
    reason: str
    questions: Count


class Calibration(Record):
    """How far a model's probabilities can be taken at their word.

    Attributes:
        ece: expected calibration error of the answer's probability, over `bins` bins of equally many questions.
        bins: how many.
        brier: mean squared distance to the right answer, summed over the options: 0 to 2.
        nll: mean negative log-likelihood of the right answer, nats.
    """

    ece: Figure
    bins: Count
    brier: Figure
    nll: Figure


class Accuracy(Record):
    """Answers against the right ones, question by question.

    Attributes:
        questions: those with a right answer that both models answered.
        reference: share that the reference has right.
        candidate: share that the candidate has right.
        difference: candidate minus reference.
        interval: of the difference (Agresti and Min: Wald after half a question is added to each of four cells).
        p_value: McNemar's exact test, two-sided, of as many flips in one direction as in the other.
        right_to_wrong: answers that the candidate alone has wrong.
        wrong_to_right: answers that the candidate alone has right.
        wrong_to_wrong: answers that both have wrong, each in its own way.
        near_ties: flips of any direction whose two answers are less than `near_tie` apart in both models.
    """

    questions: Count
    reference: Figure
    candidate: Figure
    difference: Figure
    interval: tuple[Figure, Figure]
    p_value: Figure
    right_to_wrong: Count
    wrong_to_right: Count
    wrong_to_wrong: Count
    near_ties: Count

    @property
    def flips(self) -> int:
        """Answers that changed, in any direction."""
        return self.right_to_wrong + self.wrong_to_right + self.wrong_to_wrong


class BenchmarkAccuracy(Accuracy):
    """The same for one benchmark."""

    benchmark: str


class Gold(Accuracy):
    """The comparison by right answers.

    Attributes:
        confidence: of every interval here.
        near_tie: two answers less than this apart in probability are nearly a tie.
        mean_difference: of the benchmarks' accuracy differences, each benchmark counting alike.
        reference_calibration: of the reference, over all questions.
        candidate_calibration: likewise.
        benchmarks: by name; empty where the requests name none.
    """

    confidence: Figure
    near_tie: Figure
    mean_difference: Figure | None
    reference_calibration: Calibration
    candidate_calibration: Calibration
    benchmarks: Each[BenchmarkAccuracy]


class Limits(Record):
    """The manifest's bounds on one set; a figure without a bound is only stated."""

    max_answers_changed: float | None = None
    max_kl: float | None = None


class VerificationSet(Agreement):
    """One test set, answered by two models.

    Attributes:
        name: the manifest's name for it.
        file: the request file.
        requests: those asked.
        failed: questions that one side or both did not answer; they are in no other figure.
        failures: the same by side and reason.
        kinds: the figures by type of question.
        gold: by right answers, where the requests have them.
        limits: what the set had to keep to.
    """

    name: str
    file: FileDigest | None = None
    requests: Count
    failed: Count
    failures: Each[Failure]
    kinds: Each[KindAgreement]
    gold: Gold | None
    limits: Limits = Limits()

    def broken(self) -> tuple[str, ...]:
        """The bounds that do not hold, each with set, bound and figure.

        Under a bound no question may fail on the candidate's side alone: what has no figure keeps to no bound.
        """
        figures = {"max_answers_changed": self.answers_changed_share, "max_kl": self.max_kl}
        limits = {field: limit for field, limit in self.limits if limit is not None}
        over = [
            f"{self.name}: {figures[field]:.6g} is above {field} {limit:g}"
            for field, limit in limits.items()
            if figures[field] > limit
        ]
        lost, there = (sum(f.questions for f in self.failures if f.side == side) for side in ("candidate", "reference"))
        if limits and lost > there:
            over.append(f"{self.name}: {lost} questions failed, and {there} for the model compared with")
        return tuple(over)


class Fp8Verification(Record):
    """The unchanged adapter on the FP8 release of its base, weights and activations emulated in bfloat16.

    Attributes:
        base: the FP8 checkpoint.
        against: `base`: the reference is base + adapter; `release`: the released model.
        linears: modules that the checkpoint holds in FP8.
        sets: the same test sets.
    """

    base: Checkpoint
    against: Literal["base", "release"]
    linears: Count
    sets: Each[VerificationSet]


class Verification(Record):
    """verification.json: one per variant, beside its adapter.

    Attributes:
        path: the variant.
        adapter_sha256: of the adapter that was tried.
        runner: `decision`: the source's own decision module, its logits compared; `logits`: next-token distributions.
        device: `cpu`, or the accelerator's name.
        dtype: in which the models ran.
        packages: versions that decide the answers.
        sets: base + adapter (candidate) against the released model (reference).
        fp8: the same on the FP8 base.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    path: str
    adapter_sha256: str
    runner: Literal["decision", "logits"]
    device: str
    dtype: str
    packages: dict[str, str]
    sets: Each[VerificationSet]
    fp8: Fp8Verification | None = None


# --- push ---------------------------------------------------------------------------------------------------


Change = Literal["added", "changed", "same", "deleted", "not compared"]


class Operation(Record):
    """One file of the commit; `size` is absent for a file that would be deleted."""

    path: str
    size: Count | None
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
    operations: Each[Operation]


class ReadBack(Record):
    """What was read back from the published commit, from an empty cache."""

    files: Count
    adapters: Count


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
    files: Each[FileDigest]


class VariantOutcome(Record):
    """One variant after a run; `reused` names the stages whose earlier result still held."""

    path: str
    label: str
    reused: Each[str]
    summary: ExtractionSummary | None
    validation: Validation | None
    verification: Verification | None
    loaders: Each[LoaderVerdict] = ()


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
    stages: Each[str]
    variants: Each[VariantOutcome]
    card_changed: bool | None
    signature: Signing | None
    plan: CommitPlan | None
    push: PushOutcome | None


# --- merge --------------------------------------------------------------------------------------------------


class Merged(Record):
    """The checkpoint that was written; the document that `--json` prints.

    Attributes:
        folder: where it is.
        shards: files of weights.
        size: bytes of them.
        linears: weights with the adapter in them.
        carried: modules replaced whole.
        released: all adapted weights are the released ones in every bit, as extraction.json has it.
        share: of the adapted weights' elements that are, likewise; none where they are in FP8 or float32.
        left_out: tensors in which the release differs from the base and this checkpoint does not.
    """

    folder: str
    shards: Count
    size: Count
    linears: Count
    carried: Count
    released: bool
    share: float | None
    left_out: Each[str]


# --- explain ------------------------------------------------------------------------------------------------


class Explained(Record):
    """All that is known of one module of one variant: headings and what stands beside them, and its figures."""

    module: str
    variant: str
    label: str
    facts: tuple[tuple[str, str], ...]
    figures: ModuleExtraction


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
    checks: Each[Check]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")
