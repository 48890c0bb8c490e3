"""What two models' answers to the same requests come to: the figures of verification.json.

All arithmetic is in float64 and starts from logits, so that a shift of all logits of a question changes nothing and
equal logits give exactly zero. A question that one side did not answer, or answered with a number that is none, is
counted among the failures with its reason and enters no other figure. Refused is a set of which nothing is left.
docs/verification.md says what each figure means.
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

NEAR_TIE = 0.05  # probabilities closer than this are nearly a draw
BINS = 15
_CONFIDENCE = 0.95
_ROUNDED = 1e-5  # of a figure that follows from others: each of them is rounded to six digits
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One question, answered twice.

    Attributes:
        request: the request's id.
        question: the question's id in it.
        kind: its type.
        benchmark: what it is part of; empty where that is not known.
        reference: logits, float64 of shape (k,), of the model compared with; None where it failed. One logit alone
            is the log odds of yes against no.
        candidate: likewise, of the model that is tried.
        gold: index of the right answer, if it is known.
        reference_failure: why `reference` is None.
        candidate_failure: likewise.
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
    """One model's answer to a question with a right answer."""

    answer: int
    right: bool
    confidence: float
    brier: float
    nll: float


@dataclass(frozen=True, slots=True)
class _Compared:
    """The scalars that are kept of one question."""

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
    """The figures of one test set; of each pair only scalars are kept, and the order of the pairs changes nothing.

    Raises:
        VerificationError: no question was answered by both, or a right answer is none of the options.
    """
    compared: list[_Compared] = []
    failures: Counter[tuple[Side, str]] = Counter()
    requests, failed = set[str](), 0
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
    """KL(reference || candidate) in nats, of two sets of finite logits; never below zero, and zero for equal ones.

    Each term is p log(p/q) - p + q: their sum is the divergence, and none of them is negative.
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
    """Logits of all options: one logit alone is that of yes, before a no at zero."""
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
    p, answer = special.softmax(logits), int(logits.argmax())
    off = p.copy()
    off[gold] -= 1
    return _Scored(
        answer, answer == gold, float(p[answer]), float(off @ off), -float(special.log_softmax(logits)[gold])
    )


# --- agreement ----------------------------------------------------------------------------------------------


def _agreement(compared: Sequence[_Compared]) -> Agreement:
    kl, changed = np.array([one.kl for one in compared]), sum(one.changed for one in compared)
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
    """Two-sided p of a split of the flips at least so uneven, by a fair coin; 1 where there are none."""
    return float(stats.binomtest(won, won + lost, 0.5).pvalue) if won + lost else 1.0


def paired_interval(won: int, lost: int, *, total: int) -> tuple[float, float]:
    """Interval of (won - lost) / total, by Agresti and Min (2005): half a question added to each of four cells."""
    n, difference = total + 2, (won - lost) / (total + 2)
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
    """Mean distance between stated and found accuracy, over bins of equally many questions by rising confidence.

    Questions of equal confidence share their mean accuracy, so that their order does not matter where a bin ends.
    """
    levels, places = np.unique(confidence, return_inverse=True)
    share = np.bincount(places, weights=right) / np.bincount(places)
    order = np.argsort(places, kind="stable")
    gaps = share[places][order] - levels[places][order]
    return math.fsum(abs(math.fsum(part)) for part in np.array_split(gaps, bins)) / len(confidence)


# --- reading them again -------------------------------------------------------------------------------------


def inconsistencies(found: VerificationSet) -> Iterator[str]:
    """What of a set's figures does not follow from its others, and the bounds that do not hold."""
    yield from found.broken()
    parts: list[tuple[str, Agreement]] = [("", found), *((f" {kind.kind}", kind) for kind in found.kinds)]
    for part, figures in parts:
        share = figures.answers_changed / figures.questions
        yield from _off(f"{found.name}{part}", figures, answers_changed_share=share)
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


def _off(place: str, record: Record, **expected: float) -> Iterator[str]:
    for field, value in expected.items():
        found = getattr(record, field)
        if not math.isclose(found, value, rel_tol=_ROUNDED, abs_tol=_ROUNDED * _ROUNDED):
            yield f"{place}: {field} is {found}; it comes out as {value:.6g}"
