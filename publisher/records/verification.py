"""verification.json: how the answers of base + adapter agree with those of the released model."""

from typing import Literal

from publisher.records.checkpoint import Checkpoint, FileDigest
from publisher.records.record import SCHEMA_VERSION, Count, Each, Figure, Record
from publisher.records.validation import Kind

Side = Literal["reference", "candidate"]


class Agreement(Record):
    """How two models' distributions over the same options differ; divergences in nats.

    Attributes:
        questions: those that both answered; every figure here is over these.
        answers_changed: questions whose most probable option is another one; the first of several equal ones counts.
        answers_changed_share: their share of `questions`.
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
        interval: confidence interval of the difference (Agresti and Min: Wald after half a question is added to each of
            four cells).
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
        confidence: confidence level of every interval here.
        near_tie: two answers less than this apart in probability are nearly a tie.
        mean_difference: mean of the benchmarks' accuracy differences, each benchmark counting alike.
        reference_calibration: calibration of the reference, over all questions.
        candidate_calibration: calibration of the candidate, over the same questions.
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
        """Return the bounds that do not hold, each with set, bound and figure.

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
