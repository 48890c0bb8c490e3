"""How often a unit may fail on a cluster, and what Ray is asked to set aside for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from publisher.engines.ray_engine import _rounded
from publisher.engines.retries import TRIES, Failures
from publisher.errors import EngineError, FetchError, HubError, NoRoomError, PublisherError, VerificationError


def test_the_third_failure_for_one_reason_names_unit_and_reason() -> None:
    failures = Failures()
    for _ in range(TRIES - 1):
        failures.add("extracting a.weight", OSError("no such mount"))
    with pytest.raises(EngineError, match=r"^extracting a\.weight failed 3 times: OSError: no such mount\. Next: "):
        failures.add("extracting a.weight", OSError("no such mount"))


def test_failures_of_other_units_and_for_other_reasons_count_apart() -> None:
    failures = Failures()
    for number in range(20):
        failures.add(f"unit {number}", OSError("lost"))
        failures.add("one unit", OSError(f"reason {number}"))


@pytest.mark.parametrize("kind", [FetchError, HubError, NoRoomError, EngineError])
def test_what_another_machine_may_not_meet_is_tried_again(kind: type[PublisherError]) -> None:
    failures = Failures()
    failures.add("unit", kind("gone"))
    failures.add("unit", kind("gone"))
    with pytest.raises(EngineError, match="unit failed 3 times: gone"):
        failures.add("unit", kind("gone"))


def test_what_is_said_about_the_unit_is_raised_as_it_is() -> None:
    error = VerificationError("a batch does not fit")
    with pytest.raises(VerificationError) as raised:
        Failures().add("unit", error)
    assert raised.value is error


@given(st.integers(0, 1 << 45))
def test_memory_is_rounded_up_by_a_quarter_at_most(size: int) -> None:
    assert size <= _rounded(size) <= 1.25 * size


def test_all_sizes_up_to_a_terabyte_become_few() -> None:
    assert len({_rounded(int(1.01**power)) for power in range(2777)}) <= 4 * 40
