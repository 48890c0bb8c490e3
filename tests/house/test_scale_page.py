"""The arithmetic behind docs/scale.md, by hand, and that the page says what is measured and what is not."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import capacity, scale_page
from benchmarks.capacity import Costs, Line, Model, Time

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text(encoding="utf-8")
COSTS = Costs(
    task=0.5,
    task_byte=1e-6,
    driver=0.25,
    taking=1e-6,
    sending=2e-6,
    waiting=0.125,
    writing=1e-9,
    extracting=Line(module=1.0, element=1e-6),
    checking=Line(module=0.0, element=1e-7),
    weighing=1e9,
    comparing=1e6,
    hashing=2e6,
)
MODEL = Model("small", {(2000, 1000): 3, (100, 500): 1}, 10_000_000)
# --- one unit -------------------------------------------------------------------------------------------------------


def test_factors_have_the_rank_or_the_shorter_side_if_that_is_less() -> None:
    assert capacity.factors_of((2000, 1000)) == 2 * 256 * 3000
    assert capacity.factors_of((100, 500)) == 2 * 100 * 600


def test_a_cluster_pays_once_its_start_is_earned_back_by_every_later_count_too() -> None:
    # 10 + 2 ceil(n / 2) against 2 n: 22 and 22 at 11, 22 and 24 at 12, 24 and 26 at 13
    assert capacity.break_even(start=10, local=2, remote=2, workers=2) == 12
    # 3 + 4 ceil(n / 4) against 2 n: 7 and 8 at 4, but 11 and 10 at 5; 11 and 12 at 6, and 15 and 18 at 9
    assert capacity.break_even(start=3, local=2, remote=4, workers=4) == 6
    assert capacity.break_even(start=0, local=3, remote=2, workers=1) == 1


def test_a_cluster_that_gains_nothing_a_unit_never_pays() -> None:
    assert capacity.break_even(start=0, local=2, remote=4, workers=2) is None


def test_a_unit_is_large_enough_where_a_hundredth_of_its_work_is_what_ray_costs() -> None:
    work = Line(module=0.0, element=1e-8)  # a hundredth of it is 0.01 s at a side of 10,000
    assert capacity.smallest_side(replace(COSTS, extracting=work, task=0.01, task_byte=0.0)) == 10_000
    # results alone: 1024 m bytes at 1 us for 1024 of them
    assert capacity.smallest_side(replace(COSTS, extracting=work, task=0.0, task_byte=1e-6 / 1024)) == 10_000
    # both: 1e-10 m^2 = 1e-6 m + 0.02 at 20,000
    assert capacity.smallest_side(replace(COSTS, extracting=work, task=0.02, task_byte=1e-6 / 1024)) == 20_000


def test_a_line_goes_through_both_measurements() -> None:
    line = Line.through((10, 3.0), (30, 7.0))
    assert [line.module, line.element] == pytest.approx([1.0, 0.2])
    assert line.of(100, modules=4) == pytest.approx(4 * 1.0 + 20.0)


# --- a whole model --------------------------------------------------------------------------------------------------


def test_bytes_of_a_model_follow_from_its_shapes() -> None:
    assert (MODEL.modules, MODEL.elements, MODEL.largest) == (4, 6_050_000, 2_000_000)
    assert MODEL.hashed == 40_000_000
    assert MODEL.compared == 4 * (10_000_000 - 6_050_000 + 3 * 1_048_576 + 50_000)
    assert MODEL.extracted == 24_200_000
    assert MODEL.factors == 3 * 1_536_000 + 120_000
    assert MODEL.disk == 5 * MODEL.factors


def test_each_stage_takes_as_long_as_its_slowest_part() -> None:
    found = capacity.stages(MODEL, COSTS, workers=2, storage=4e6)
    limits = {"hashing": "hashing", "comparing": "arithmetic", "extracting": "arithmetic", "checking": "driver"}
    assert {stage: time.limit for stage, time in found.items()} == limits
    assert [time.seconds for time in found.values()] == pytest.approx(
        [
            20.0,
            MODEL.compared / 2e6,
            # 4 s of modules, 6.05 s of elements, 2 s of tasks and 4.728 s of results, on two; storage takes 6.05 s
            (4 + 6.05 + 2 + 4.728) / 2,
            # 9.456 s of bytes, and 4 times 0.25 s and 4 units under way at 0.125 s each
            9.456 + 4 * (0.25 + 4 * 0.125),
        ]
    )


def test_many_workers_leave_storage_the_driver_or_the_largest_module() -> None:
    found = capacity.stages(MODEL, COSTS, workers=1000, storage=1e6)
    assert {stage: time.limit for stage, time in found.items()} == dict.fromkeys(found, "storage")
    quick = replace(COSTS, driver=0.0, waiting=0.0, taking=0.0)
    assert capacity.stages(MODEL, quick, workers=1000, storage=1e12)["extracting"] == Time(3.0, "largest module")


def test_the_limit_is_what_most_of_the_seconds_are_due_to() -> None:
    times = [Time(3.0, "storage"), Time(4.0, "driver"), Time(2.0, "storage")]
    assert capacity.limit_of(times) == "storage"


def test_results_that_may_wait_are_the_largest_two_for_each_worker() -> None:
    assert capacity.waiting_results(MODEL, 1) == 2 * 1_536_000
    assert capacity.waiting_results(MODEL, 8) == MODEL.factors


def test_the_models_of_the_page_have_the_sizes_that_they_are_called_by() -> None:
    dense, large, apart, everything = scale_page.models()
    assert (dense.modules, dense.elements) == (496, 48 * 383_221_760 + 16 * 372_244_480)
    assert large.parameters == 126 * 3_187_671_040 + 4_202_692_608
    assert 1.02e12 < apart.parameters == everything.parameters < 1.03e12
    assert everything.elements - apart.elements == 60 * 384 * 3 * 2048 * 7168
    assert everything.largest == math.prod((18432, 7168))


# --- the page -------------------------------------------------------------------------------------------------------


def test_the_page_is_of_this_template_and_every_figure_is_filled_in() -> None:
    assert _headings(PAGE) == _headings(scale_page.PAGE)
    assert not re.search(r"\{[a-z_]+\}", PAGE)


def test_every_part_has_its_table() -> None:
    parts = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
    for heading, text in parts.items():
        if heading != "From which size a unit is worth a task":
            assert re.search(r"^\|[-|]+\|\n\| ", text, re.MULTILINE), heading


def test_what_was_not_run_is_called_an_extrapolation() -> None:
    assert "no model was run at those sizes" in _unwrapped(PAGE)
    assert "no figure of a GPU was measured" in _unwrapped(PAGE)
    assert "All that follows is an extrapolation" in PAGE
    sizes = [part for part in PAGE.split("\n## ")[1:] if "405B" in part or "1T" in part]
    assert sizes
    assert all(part.startswith("Extrapolated:") for part in sizes)


def _headings(text: str) -> list[str]:
    return re.findall(r"^#+ .*", text, re.MULTILINE)


def _unwrapped(text: str) -> str:
    return " ".join(text.split())
