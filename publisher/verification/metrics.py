"""How two models' answers to the same requests compare: the metrics of verification.json.

One model is the reference, the other the candidate. All arithmetic is in float64 and starts from logits, so that a
shift of all logits of a question changes nothing and equal logits give exactly zero. A question that one side did not
answer, or answered with logits that are no finite numbers, is counted among the failures with its reason and enters no
other metric. It refuses a set of which no question is left. docs/verification.md says what each metric means.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from publisher.errors import VerificationError
from publisher.records.checkpoint import FileDigest
from publisher.records.record import Record
from publisher.records.validation import Kind
from publisher.records.verification import (
    Accuracy,
    Agreement,
    BenchmarkAccuracy,
    Calibration,
    Failure,
    Gold,
    KindAgreement,
    Limits,
    Side,
    VerificationSet,
)

NEAR_TIE = 0.05
"""Two options whose probabilities are closer than this are nearly a draw."""
BINS = 15
"""Bins of the calibration error, fewer where there are fewer questions."""
_CONFIDENCE = 0.95
_ROUNDED = 1e-5  # what a metric that follows from others may be off by: each of them is rounded to six digits
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """The reference's and the candidate's answer to one question.

    Attributes:
        request: the request's id.
        question: the question's id in the request.
        kind: the type of the question; a `noul` is one that is answered by yes or no.
        benchmark: the benchmark that the request is part of; empty where that is not known.
        reference: logits of the model compared with, float64 of shape (options,); None where it failed. One logit
            alone is the log odds of yes against no.
        candidate: logits of the model that is tried, in the same form.
        gold: index of the right option, counted from 0; None where it is not known.
        reference_failure: why `reference` is None.
        candidate_failure: why `candidate` is None.
    """

    request: str
    question: str
    kind: Kind
    benchmark: str
    reference: Floats | None
    candidate: Floats | None
    gold: int | None = None
    reference_failure: str = "no answer"
    candidate_failure: str = "no answer"


@dataclass(frozen=True, slots=True)
class _Scored:
    """One model's answer to a question with a right answer.

    Attributes:
        answer: index of the most probable option.
        right: whether that is the right option.
        confidence: probability of the answer.
        brier: squared distance of the probabilities from the right answer, 0 to 2.
        nll: negative log-likelihood of the right option, nats.
    """

    answer: int
    right: bool
    confidence: float
    brier: float
    nll: float


@dataclass(frozen=True, slots=True)
class _Compared:
    """The scalars that are kept of one question.

    Attributes:
        kind: the type of the question.
        benchmark: the benchmark that it is part of, or nothing.
        changed: whether the two answers are different options.
        tied: whether an option is as probable as the answer, for either model.
        kl: KL(reference || candidate), nats.
        difference: largest difference between the two probabilities of one option.
        near: whether the two answers are nearly a draw for both models.
        gold: both answers against the right one, reference first; None where that is not known.
    """

    kind: Kind
    benchmark: str
    changed: bool
    tied: bool
    kl: float
    difference: float
    near: bool
    gold: tuple[_Scored, _Scored] | None


def set_metrics(
    name: str, pairs: Iterable[AnswerPair], *, file: FileDigest | None = None, limits: Limits | None = None
) -> VerificationSet:
    """Compute the metrics of one test set.

    Of each pair only scalars are kept, and the order of the pairs changes nothing.

    Args:
        name: the test set's name in the manifest.
        pairs: both answers to each question of the set.
        file: the request file, for the record.
        limits: the manifest's bounds on the set; they are recorded here and judged by `VerificationSet.broken`.

    Returns:
        The record of the set, as verification.json holds it: divergences in nats, shares and probabilities from 0 to 1.

    Raises:
        VerificationError: no question was answered by both, or a right answer is none of the options.
    """
    compared: list[_Compared] = []
    failures: Counter[tuple[Side, str]] = Counter()
    requests: set[str] = set()
    failed = 0
    for pair in pairs:
        requests.add(pair.request)
        found = _failures(pair)
        failures.update(found)
        failed += bool(found)
        if not found:
            compared.append(_compared(pair))
    if not compared:
        raise _nothing(name, failures)
    return VerificationSet(
        name=name,
        file=file,
        requests=len(requests),
        failed=failed,
        failures=tuple(Failure(side=s, reason=why, questions=n) for (s, why), n in sorted(failures.items())),
        kinds=_by_kind(compared),
        gold=_gold(compared),
        limits=limits or Limits(),
        **_agreement(compared).model_dump(),
    )


def divergence(reference: Floats, candidate: Floats) -> float:
    """Return the Kullback-Leibler divergence KL(reference || candidate) in nats.

    It is never below zero, and exactly zero for equal logits: each term is p log(p/q) - p + q, of which none is
    negative, and their sum is the divergence since both p and q add up to 1
    (https://docs.scipy.org/doc/scipy/reference/generated/scipy.special.kl_div.html).

    Args:
        reference: finite logits, float64 of shape (options,).
        candidate: finite logits of the same options.
    """
    p_log, q_log = special.log_softmax(reference), special.log_softmax(candidate)
    p, q = np.exp(p_log), np.exp(q_log)
    return math.fsum(np.maximum(p * (p_log - q_log) + (q - p), 0.0))


# --- one question -------------------------------------------------------------------------------------------


def _failures(pair: AnswerPair) -> list[tuple[Side, str]]:
    sides: list[tuple[Side, Floats | None, str]] = [
        ("reference", pair.reference, pair.reference_failure),
        ("candidate", pair.candidate, pair.candidate_failure),
    ]
    found = [(side, _failure(logits, why)) for side, logits, why in sides]
    if not any(why for _, why in found) and len(_options(pair.reference)) != len(_options(pair.candidate)):
        return [("candidate", "another number of options")]
    return [(side, why) for side, why in found if why]


def _failure(logits: Floats | None, why: str) -> str:
    if logits is None:
        return why
    return "" if logits.size and np.isfinite(logits).all() else "logits that are no finite numbers"


def _options(logits: Floats | None) -> Floats:
    """Return the logits of all options: one logit alone is that of yes, which comes before a no at zero."""
    given = np.zeros(0) if logits is None else np.asarray(logits, dtype=np.float64).ravel()
    return np.concatenate([given, np.zeros(1)]) if given.size == 1 else given


def _compared(pair: AnswerPair) -> _Compared:
    reference, candidate = _options(pair.reference), _options(pair.candidate)
    p, q = special.softmax(reference), special.softmax(candidate)
    if pair.gold is not None and not 0 <= pair.gold < len(reference):
        raise VerificationError(
            f"request {pair.request}, question {pair.question}: the right answer is option {pair.gold}",
            expected=f"one of {len(reference)} options, counted from 0",
            next_step="correct the request file",
        )
    first, second = int(reference.argmax()), int(candidate.argmax())
    return _Compared(
        kind=pair.kind,
        benchmark=pair.benchmark,
        changed=first != second,
        tied=any(np.count_nonzero(one == one.max()) > 1 for one in (reference, candidate)),
        kl=divergence(reference, candidate),
        difference=float(np.abs(p - q).max()),
        near=bool(max(p[first] - p[second], q[second] - q[first]) < NEAR_TIE),
        gold=None if pair.gold is None else (_scored(reference, pair.gold), _scored(candidate, pair.gold)),
    )


def _scored(logits: Floats, gold: int) -> _Scored:
    """Hold an answer against the right one.

    The Brier score is Brier's own, summed over the options
    (https://doi.org/10.1175/1520-0493(1950)078%3C0001:VOFEIT%3E2.0.CO;2).
    """
    probabilities = special.softmax(logits)
    answer = int(logits.argmax())
    distance = probabilities.copy()
    distance[gold] -= 1
    return _Scored(
        answer=answer,
        right=answer == gold,
        confidence=float(probabilities[answer]),
        brier=float(distance @ distance),
        nll=-float(special.log_softmax(logits)[gold]),
    )


# --- agreement ----------------------------------------------------------------------------------------------


def _agreement(compared: Sequence[_Compared]) -> Agreement:
    kl = np.array([one.kl for one in compared])
    changed = sum(one.changed for one in compared)
    return Agreement(
        questions=len(compared),
        answers_changed=changed,
        answers_changed_share=changed / len(compared),
        ties=sum(one.tied for one in compared),
        max_kl=float(kl.max()),
        mean_kl=math.fsum(kl) / len(kl),
        p99_kl=float(np.percentile(kl, 99)),
        max_probability_difference=max(one.difference for one in compared),
    )


def _by_kind(compared: Sequence[_Compared]) -> tuple[KindAgreement, ...]:
    groups: defaultdict[Kind, list[_Compared]] = defaultdict(list)
    for one in compared:
        groups[one.kind].append(one)
    return tuple(KindAgreement(kind=kind, **_agreement(groups[kind]).model_dump()) for kind in sorted(groups))


def _nothing(name: str, failures: Counter[tuple[Side, str]]) -> VerificationError:
    reasons = "; ".join(f"{side}: {why} ({n})" for (side, why), n in sorted(failures.items()))
    return VerificationError(
        f"{name}: no question was answered by both models ({reasons or 'the set asks none'})",
        expected="requests with questions that both can answer",
        next_step="correct the request file, or remove the set from the manifest",
    )


# --- right answers ------------------------------------------------------------------------------------------

_Flip = tuple[_Scored, _Scored, bool]  # reference, candidate, near


def _gold(compared: Sequence[_Compared]) -> Gold | None:
    groups: defaultdict[str, list[_Flip]] = defaultdict(list)
    for one in compared:
        if one.gold is not None:
            groups[one.benchmark].append((*one.gold, one.near))
    if not groups:
        return None
    scored = [flip for group in groups.values() for flip in group]
    named = {name: _accuracy(groups[name]) for name in sorted(groups) if name}
    differences = [(a.wrong_to_right - a.right_to_wrong) / a.questions for a in named.values()]
    return Gold(
        confidence=_CONFIDENCE,
        near_tie=NEAR_TIE,
        mean_difference=math.fsum(differences) / len(named) if named else None,
        reference_calibration=_calibration([reference for reference, _, _ in scored]),
        candidate_calibration=_calibration([candidate for _, candidate, _ in scored]),
        benchmarks=tuple(BenchmarkAccuracy(benchmark=name, **found.model_dump()) for name, found in named.items()),
        **_accuracy(scored).model_dump(),
    )


def _accuracy(scored: Sequence[_Flip]) -> Accuracy:
    total = len(scored)
    lost = sum(one.right and not other.right for one, other, _ in scored)
    won = sum(other.right and not one.right for one, other, _ in scored)
    flips = [near for one, other, near in scored if one.answer != other.answer]
    right = sum(one.right for one, _, _ in scored)
    return Accuracy(
        questions=total,
        reference=right / total,
        candidate=(right + won - lost) / total,
        difference=(won - lost) / total,
        interval=paired_interval(won, lost, total=total),
        p_value=exact_mcnemar(won, lost),
        right_to_wrong=lost,
        wrong_to_right=won,
        wrong_to_wrong=len(flips) - won - lost,
        near_ties=sum(flips),
    )


def exact_mcnemar(won: int, lost: int) -> float:
    """Return the two-sided p-value of McNemar's exact test; 1 where no answer changed between right and wrong.

    It is the probability that a fair coin splits the changed answers at least so unevenly: a binomial test of `won`
    among `won + lost` at 1/2 (McNemar 1947, https://doi.org/10.1007/BF02295996;
    https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats.binomtest.html).

    Args:
        won: questions that the candidate alone has right.
        lost: questions that the reference alone has right.
    """
    return float(stats.binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0


def paired_interval(won: int, lost: int, *, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of the candidate's accuracy minus the reference's, over the same questions.

    It is Wald's interval after half a question is added to each of the four cells of right and wrong: "Wald+2" of
    Agresti and Min 2005 (https://doi.org/10.1002/sim.1781, and as code by the first author:
    http://users.stat.ufl.edu/~aa/cda/R/matched/R2_matched/index.html).

    Args:
        won: questions that the candidate alone has right.
        lost: questions that the reference alone has right.
        total: all questions with a right answer.

    Returns:
        Lower and upper end, as shares from -1 to 1.
    """
    n = total + 2
    difference = (won - lost) / n
    deviation = math.sqrt((won + lost + 1) / n - difference**2) / math.sqrt(n)
    reach = float(stats.norm.ppf((1 + _CONFIDENCE) / 2)) * deviation
    return max(difference - reach, -1.0), min(difference + reach, 1.0)


def _calibration(scored: Sequence[_Scored]) -> Calibration:
    bins = min(BINS, len(scored))
    confidence, right = (np.array([getattr(one, field) for one in scored], float) for field in ("confidence", "right"))
    return Calibration(
        ece=calibration_error(confidence, right, bins=bins),
        bins=bins,
        brier=math.fsum(one.brier for one in scored) / len(scored),
        nll=math.fsum(one.nll for one in scored) / len(scored),
    )


def calibration_error(confidence: Floats, right: Floats, *, bins: int) -> float:
    """Return the expected calibration error: the mean distance between stated and found accuracy.

    The questions are split, by rising confidence, into bins of equally many; a bin's distance is that between the
    mean confidence and the accuracy in it, and bins count by their questions. Bins of equal width (Naeini, Cooper and
    Hauskrecht 2015, https://doi.org/10.1609/aaai.v29i1.9602) would leave most bins empty for a confident model; bins
    of equal mass are compared with them in Nixon et al. 2019 (https://arxiv.org/abs/1904.01685). Questions of equal
    confidence share their mean accuracy, so that their order does not matter where a bin ends.

    Args:
        confidence: probability of each answer, float64 of shape (questions,).
        right: 1 where the answer is right and 0 where it is not, float64 of shape (questions,).
        bins: number of bins, at most the number of questions.

    Returns:
        The error, from 0 to 1.
    """
    levels, places = np.unique(confidence, return_inverse=True)
    share = np.bincount(places, weights=right) / np.bincount(places)
    order = np.argsort(places, kind="stable")
    gaps = share[places][order] - levels[places][order]
    return math.fsum(abs(math.fsum(part)) for part in np.array_split(gaps, bins)) / len(confidence)


# --- reading them again -------------------------------------------------------------------------------------


def inconsistencies(found: VerificationSet) -> Iterator[str]:
    """Yield the metrics of a set that do not follow from its others, and the bounds that do not hold."""
    yield from found.broken()
    parts: list[tuple[str, Agreement]] = [("", found), *((f" {kind.kind}", kind) for kind in found.kinds)]
    for part, agreement in parts:
        share = agreement.answers_changed / agreement.questions
        yield from _off(f"{found.name}{part}", agreement, answers_changed_share=share)
    for field in ("questions", "answers_changed", "ties"):
        yield from _off(found.name, found, **{field: sum(getattr(kind, field) for kind in found.kinds)})
    for field in ("max_kl", "max_probability_difference"):
        yield from _off(found.name, found, **{field: max(getattr(kind, field) for kind in found.kinds)})
    mean = math.fsum(kind.mean_kl * kind.questions for kind in found.kinds) / found.questions
    yield from _off(found.name, found, mean_kl=mean)
    sides = [sum(f.questions for f in found.failures if f.side == side) for side in ("reference", "candidate")]
    if not max(sides) <= found.failed <= sum(sides):
        yield f"{found.name}: failed is {found.failed}; the failures of the two sides are {sides[0]} and {sides[1]}"
    if found.gold is not None:
        yield from _gold_inconsistencies(found.name, found.gold)


def _gold_inconsistencies(name: str, gold: Gold) -> Iterator[str]:
    for place, one in [(name, gold), *((f"{name}, {b.benchmark}", b) for b in gold.benchmarks)]:
        won, lost = one.wrong_to_right, one.right_to_wrong
        yield from _off(place, one, difference=(won - lost) / one.questions, p_value=exact_mcnemar(won, lost))
        if not math.isclose(one.candidate, one.reference + one.difference, abs_tol=_ROUNDED):
            yield f"{place}: difference is {one.difference}; {one.reference} and {one.candidate} do not differ by it"
        expected = paired_interval(won, lost, total=one.questions)
        if not all(math.isclose(*pair, abs_tol=_ROUNDED) for pair in zip(one.interval, expected, strict=True)):
            yield f"{place}: interval is {one.interval}; it comes out as ({expected[0]:.6g}, {expected[1]:.6g})"
    if gold.mean_difference is not None and gold.benchmarks:
        shares = [(b.wrong_to_right - b.right_to_wrong) / b.questions for b in gold.benchmarks]
        yield from _off(name, gold, mean_difference=math.fsum(shares) / len(shares))


def _off(where: str, record: Record, **expected: float) -> Iterator[str]:
    """Yield the fields of a record that are not what they should come out as, but for rounding."""
    for field, value in expected.items():
        found = getattr(record, field)
        if not math.isclose(found, value, rel_tol=_ROUNDED, abs_tol=_ROUNDED * _ROUNDED):
            yield f"{where}: {field} is {found}; it comes out as {value:.6g}"
