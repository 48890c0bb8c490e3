"""Known answers, worked by hand, for every figure of a verification, and what holds for any answers."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.errors import VerificationError
from publisher.records.validation import Kind
from publisher.records.verification import Gold, Limits, VerificationSet
from publisher.verification import metrics
from publisher.verification.metrics import AnswerPair, divergence, set_metrics

NOBODY = np.zeros(0)


def logs(*probabilities: float) -> metrics.Floats:
    return np.array([math.log(p) for p in probabilities])


def pair(reference: Any, candidate: Any, **fields: Any) -> AnswerPair:
    facts = {"request": "r", "question": "q", "kind": "choice", "benchmark": ""} | fields
    return AnswerPair(reference=reference, candidate=candidate, **facts)


def gold_of(found: VerificationSet) -> Gold:
    assert found.gold is not None
    return found.gold


def flips(won: int, lost: int, *, kept: int, benchmark: str = "") -> list[AnswerPair]:
    """So many questions answered rightly by the candidate alone, by the reference alone, and by both."""
    yes, no = logs(0.1, 0.9), logs(0.9, 0.1)
    cases = [(no, yes)] * won + [(yes, no)] * lost + [(yes, yes)] * kept
    return [pair(one, other, gold=1, benchmark=benchmark) for one, other in cases]


# --- known answers ------------------------------------------------------------------------------------------


def test_the_divergence_is_that_of_the_candidate_from_the_reference() -> None:
    half, skewed = logs(0.5, 0.5), logs(0.75, 0.25)
    assert divergence(half, skewed) == pytest.approx(0.5 * math.log(4 / 3))
    assert divergence(skewed, half) == pytest.approx(0.75 * math.log(3 / 2) - 0.25 * math.log(2))


def test_a_set_of_three_questions_has_the_figures_worked_by_hand() -> None:
    half, skewed = logs(0.5, 0.5), logs(0.25, 0.75)
    pairs = [
        pair(skewed, skewed, request="a"),
        pair(half, skewed, request="a", question="p", kind="noul"),
        pair(logs(0.2, 0.3, 0.5), logs(0.2, 0.3, 0.5), request="b", kind="score"),
    ]
    found = set_metrics("three", pairs)
    kl = 0.5 * math.log(4 / 3)
    assert (found.requests, found.questions, found.failed) == (2, 3, 0)
    assert (found.answers_changed, found.answers_changed_share, found.ties) == (1, 0.333333, 1)
    assert found.max_kl == pytest.approx(kl, rel=1e-5)
    assert found.mean_kl == pytest.approx(kl / 3, rel=1e-5)
    assert found.p99_kl == pytest.approx(0.98 * kl, rel=1e-5)  # 98 % of the way from the second to the third
    assert found.max_probability_difference == 0.25
    assert [(kind.kind, kind.questions, kind.answers_changed) for kind in found.kinds] == [
        ("choice", 1, 0),
        ("noul", 1, 1),
        ("score", 1, 0),
    ]
    assert found.gold is None


def test_one_logit_alone_is_the_log_odds_of_yes() -> None:
    odds = np.array([math.log(3.0)])
    assert set_metrics("odds", [pair(odds, logs(0.75, 0.25), kind="noul")]).max_kl == pytest.approx(0, abs=1e-15)
    assert gold_of(set_metrics("odds", [pair(odds, -odds, gold=0)])).right_to_wrong == 1


def test_of_equal_options_the_first_is_the_answer_and_the_tie_is_counted() -> None:
    tie, second = logs(0.4, 0.4, 0.2), logs(0.3, 0.5, 0.2)
    found = set_metrics("ties", [pair(tie, tie), pair(tie, second), pair(second, second)])
    assert (found.ties, found.answers_changed) == (2, 1)


def test_failures_are_counted_by_side_and_reason_and_enter_no_figure() -> None:
    yes = logs(0.1, 0.9)
    pairs = [
        pair(yes, yes, request="a"),
        pair(None, yes, request="b", reference_failure="too long"),
        pair(None, None, request="c", reference_failure="too long", candidate_failure="no image"),
        pair(yes, np.array([1.0, np.nan]), request="d"),
        pair(yes, logs(0.1, 0.2, 0.7), request="e"),
        pair(yes, NOBODY, request="f"),
    ]
    found = set_metrics("failing", pairs)
    assert (found.requests, found.questions, found.failed, found.max_kl) == (6, 1, 5, 0.0)
    assert [(one.side, one.reason, one.questions) for one in found.failures] == [
        ("candidate", "another number of options", 1),
        ("candidate", "logits that are no finite numbers", 2),
        ("candidate", "no image", 1),
        ("reference", "too long", 2),
    ]


def test_a_set_of_which_nothing_is_left_is_refused_with_the_reasons() -> None:
    with pytest.raises(VerificationError, match=r"Vision: no question was .* \(candidate: no image \(2\)\)"):
        set_metrics("Vision", [pair(logs(0.5, 0.5), None, candidate_failure="no image")] * 2)


@pytest.mark.parametrize("gold", [-1, 2])
def test_a_right_answer_that_is_no_option_is_refused_by_its_request(gold: int) -> None:
    with pytest.raises(VerificationError, match=rf"request r, question q: the right answer is option {gold}"):
        set_metrics("gold", [pair(logs(0.5, 0.5), logs(0.5, 0.5), gold=gold)])


def test_accuracies_flips_and_their_test_are_those_worked_by_hand() -> None:
    found = gold_of(set_metrics("gold", flips(1, 5, kept=4)))
    assert (found.reference, found.candidate, found.difference) == (0.9, 0.5, -0.4)
    assert (found.right_to_wrong, found.wrong_to_right, found.wrong_to_wrong, found.flips) == (5, 1, 0, 6)
    assert found.p_value == 2 * (1 + 6) / 2**6
    deviation = math.sqrt((7 / 12 - (4 / 12) ** 2) / 12)
    expected = [-4 / 12 - 1.959964 * deviation, -4 / 12 + 1.959964 * deviation]
    assert found.interval == pytest.approx(expected, rel=1e-5)


def test_a_flip_between_wrong_answers_is_no_change_of_accuracy() -> None:
    found = gold_of(set_metrics("wrong", [pair(logs(0.6, 0.3, 0.1), logs(0.3, 0.6, 0.1), gold=2)]))
    assert (found.wrong_to_wrong, found.difference, found.p_value) == (1, 0.0, 1.0)


def test_a_flip_is_near_a_tie_only_where_both_models_nearly_tie() -> None:
    near, far = logs(0.51, 0.49), logs(0.2, 0.8)
    pairs = [pair(near, near[::-1], gold=0), pair(near, far, gold=0), pair(far, near, gold=0), pair(near, near, gold=0)]
    found = gold_of(set_metrics("near", pairs))
    assert (found.flips, found.near_ties, found.near_tie) == (3, 1, 0.05)


def test_benchmarks_are_counted_apart_and_weigh_alike_in_the_mean() -> None:
    pairs = flips(0, 1, kept=9, benchmark="b") + flips(1, 0, kept=1, benchmark="a") + flips(0, 1, kept=0)
    found = gold_of(set_metrics("two", pairs))
    assert [(one.benchmark, one.questions, one.difference) for one in found.benchmarks] == [
        ("a", 2, 0.5),
        ("b", 10, -0.1),
    ]
    assert (found.questions, found.mean_difference) == (13, 0.2)


def test_the_calibration_is_that_worked_by_hand() -> None:
    sure, unsure = logs(0.1, 0.9), logs(0.4, 0.6)
    found = gold_of(set_metrics("calibration", [pair(sure, unsure, gold=1), pair(sure, unsure, gold=0)]))
    of_sure, of_unsure = found.reference_calibration, found.candidate_calibration
    assert of_sure.bins == 2
    assert (of_sure.ece, of_unsure.ece) == pytest.approx((0.4, 0.1))
    assert of_sure.brier == pytest.approx((2 * 0.1**2 + 2 * 0.9**2) / 2)
    assert of_unsure.nll == pytest.approx(-(math.log(0.6) + math.log(0.4)) / 2, rel=1e-5)


def test_calibration_bins_hold_equally_many_questions() -> None:
    confidence, right = np.array([0.5, 0.6, 0.7, 0.9]), np.array([0.0, 1.0, 1.0, 1.0])
    assert metrics.calibration_error(confidence, right, bins=2) == pytest.approx((0.1 + 0.4) / 4)
    assert metrics.calibration_error(confidence, right, bins=1) == pytest.approx(0.3 / 4)


# --- bounds -------------------------------------------------------------------------------------------------


def test_a_broken_bound_names_set_bound_and_figure() -> None:
    limits = Limits(max_answers_changed=0.1, max_kl=10)
    found = set_metrics("Vision", flips(1, 1, kept=2), limits=limits)
    assert found.broken() == ("Vision: 0.5 is above max_answers_changed 0.1",)


def test_a_figure_on_its_bound_holds() -> None:
    assert not set_metrics("even", flips(1, 0, kept=1), limits=Limits(max_answers_changed=0.5)).broken()
    assert not set_metrics("free", flips(1, 0, kept=0)).broken()


def test_questions_that_the_candidate_alone_fails_break_a_bound() -> None:
    yes = logs(0.1, 0.9)
    found = set_metrics("lost", [pair(yes, yes), pair(yes, None)], limits=Limits(max_kl=1))
    assert found.broken() == ("lost: 1 questions failed, and 0 for the model compared with",)


# --- reading the figures again -------------------------------------------------------------------------------


def some() -> VerificationSet:
    return set_metrics("some", flips(1, 5, kept=3, benchmark="a") + flips(2, 0, kept=4, benchmark="b"))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"answers_changed_share": 0.1}, "some: answers_changed_share is 0.1; it comes out as 0.533333"),
        ({"questions": 16}, "some: questions is 16; it comes out as 15"),
        ({"max_kl": 0.001}, "some: max_kl is 0.001; it comes out as 1.75778"),
        ({"ties": 1}, "some: ties is 1; it comes out as 0"),
        ({"limits": Limits(max_kl=1)}, "some: 1.75778 is above max_kl 1"),
    ],
)
def test_a_figure_that_does_not_follow_from_the_others_is_named(changes: dict[str, Any], found: str) -> None:
    assert found in list(metrics.inconsistencies(some().model_copy(update=changes)))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"p_value": 0.9}, "some: p_value is 0.9; it comes out as 0.726562"),
        ({"difference": 0.2}, "some: difference is 0.2; it comes out as -0.133333"),
        ({"candidate": 0.9}, "some: difference is -0.133333; 0.8 and 0.9 do not differ by it"),
        ({"interval": (-0.1, 0.1)}, "some: interval is (-0.1, 0.1); it comes out as"),
        ({"mean_difference": 0.3}, "some: mean_difference is 0.3; it comes out as -0.0555556"),
    ],
)
def test_a_figure_of_the_right_answers_that_does_not_follow_is_named(changes: dict[str, Any], found: str) -> None:
    gold = gold_of(some()).model_copy(update=changes)
    named = list(metrics.inconsistencies(some().model_copy(update={"gold": gold})))
    assert any(line.startswith(found) for line in named), named


# --- what holds for any answers -----------------------------------------------------------------------------

Logits = st.lists(st.floats(-80, 80, width=32), min_size=2, max_size=6).map(np.array)
Kinds: st.SearchStrategy[Kind] = st.sampled_from(("choice", "score"))


@st.composite
def two_answers(draw: st.DrawFn) -> AnswerPair:
    size = draw(st.integers(2, 5))
    one = st.lists(st.floats(-80, 80, width=32), min_size=size, max_size=size).map(np.array)
    gold = draw(st.none() | st.integers(0, size - 1))
    name = draw(st.sampled_from(("", "x", "y")))
    return pair(draw(one), draw(one), gold=gold, benchmark=name, kind=draw(Kinds))


Sets = st.lists(two_answers(), min_size=1, max_size=8)


@given(Logits)
def test_identical_logits_give_exactly_zero(logits: metrics.Floats) -> None:
    found = set_metrics("same", [pair(logits, logits.copy(), gold=0)])
    zeros = [found.max_kl, found.mean_kl, found.p99_kl, found.max_probability_difference, gold_of(found).difference]
    assert [math.copysign(1, zero) for zero in zeros if zero == 0] == [1.0] * 5
    assert (found.answers_changed, gold_of(found).flips, gold_of(found).p_value) == (0, 0, 1.0)


@given(two_answers())
def test_no_divergence_is_negative_or_infinite(one: AnswerPair) -> None:
    assert one.reference is not None
    assert one.candidate is not None
    assert 0 <= divergence(one.reference, one.candidate) < math.inf


@given(two_answers(), st.integers(-1000, 1000))
def test_a_shift_of_all_logits_changes_nothing(one: AnswerPair, shift: int) -> None:
    assert one.reference is not None
    assert one.candidate is not None
    shifted = divergence(one.reference + shift, one.candidate)
    assert shifted == pytest.approx(divergence(one.reference, one.candidate), rel=1e-9, abs=1e-12)


@given(Sets, st.randoms(use_true_random=False))
def test_the_order_of_the_questions_changes_no_figure(pairs: Sequence[AnswerPair], random: Any) -> None:
    mixed = list(pairs)
    random.shuffle(mixed)
    assert set_metrics("any", mixed).to_json() == set_metrics("any", pairs).to_json()


@given(Sets)
def test_the_figures_agree_with_each_other(pairs: Sequence[AnswerPair]) -> None:
    found = set_metrics("any", pairs)
    assert list(metrics.inconsistencies(found)) == []
    assert 0 <= found.mean_kl <= found.max_kl
    assert found.p99_kl <= found.max_kl
    assert sum(kind.questions for kind in found.kinds) == found.questions
    assert sum(kind.answers_changed for kind in found.kinds) == found.answers_changed
    if found.gold:
        low, high = found.gold.interval
        assert -1 <= low <= high <= 1
        assert 0 <= found.gold.p_value <= 1
        assert 0 <= found.gold.reference_calibration.ece <= 1


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 30))
def test_the_test_and_the_interval_know_no_side(won: int, lost: int, kept: int) -> None:
    assert metrics.exact_mcnemar(won, lost) == pytest.approx(metrics.exact_mcnemar(lost, won))
    low, high = metrics.paired_interval(won, lost, total=won + lost + kept)
    assert metrics.paired_interval(lost, won, total=won + lost + kept) == pytest.approx((-high, -low))
