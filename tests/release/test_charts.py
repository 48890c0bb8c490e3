"""What the charts show, from figures made up for these tests."""

import math
from itertools import pairwise

import pytest

from publisher.release.charts import (
    Column,
    card_charts,
    chosen_modules,
    divergences,
    error_map,
    exact_shares,
    layer_sizes,
    spectrum,
    spot_of,
)
from publisher.release.svg import Chart, Dot, Label, Line, Mark, Rect, svg
from tests.factories import a_set, agreement, extraction, module, verification


def tips(chart: Chart | None, kind: type[Rect | Dot] = Rect) -> list[str]:
    assert chart is not None
    return [mark.tip for mark in chart.marks if isinstance(mark, kind) and mark.tip]


def words(chart: Chart | None) -> list[str]:
    assert chart is not None
    return [mark.text for mark in chart.marks if isinstance(mark, Label)]


def rect(chart: Chart, name: str) -> Rect:
    return next(mark for mark in chart.marks if isinstance(mark, Rect) and mark.tip.startswith(name))


# --- which module is where ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stack", "layer", "part", "block"),
    [
        ("model.layers.3.self_attn.q_proj", "model.layers", 3, "self_attn.q_proj", "self_attn"),
        ("transformer.h.11.attn.c_attn", "transformer.h", 11, "attn.c_attn", "attn"),
        ("model.layers.0.mlp.experts.7.up_proj", "model.layers", 0, "mlp.experts.7.up_proj", "7"),
        ("blocks.2.fc", "blocks", 2, "fc", "fc"),
        ("0.weight_matrix", "", 0, "weight_matrix", "weight_matrix"),
        ("lm_head", "", None, "lm_head", "lm_head"),
    ],
)
def test_a_module_is_placed_by_the_first_number_in_its_name(
    name: str, stack: str, layer: int | None, part: str, block: str
) -> None:
    found = spot_of(name)
    assert (found.column, found.part, found.block) == (Column(stack, layer), part, block)


# --- the map ------------------------------------------------------------------------------------------------


def test_each_module_is_a_cell_coloured_by_its_error_over_the_floor() -> None:
    errors = {"a": 0.002, "b": 0.012, "c": 0.02, "d": 0.026, "e": 0.05, "f": 0.07}
    drawn = error_map(extraction([module(f"layers.0.{key}", relative_error=e) for key, e in errors.items()]))
    assert [rect(drawn, f"layers.0.{key}\n").tone for key in errors] == ["m0", "m1", "m2", "m3", "m4", "m5"]
    assert "layers.0.d\nrelative error 2.6%, floor 2%: 1.3" in tips(drawn)


def test_layers_stand_side_by_side_in_their_order_and_parts_below_each_other() -> None:
    names = [f"model.layers.{layer}.{part}" for layer in (10, 9, 2) for part in ("mlp.up", "attn.q")]
    drawn = error_map(extraction([module(name) for name in names]))
    x = {name: rect(drawn, name).x for name in names}
    assert x["model.layers.2.mlp.up"] < x["model.layers.9.mlp.up"] < x["model.layers.10.mlp.up"]
    assert rect(drawn, "model.layers.2.attn.q").y < rect(drawn, "model.layers.2.mlp.up").y
    assert {"2", "9", "10", "layer"} <= set(words(drawn))


def test_two_stacks_are_named_and_a_module_outside_of_layers_has_a_column() -> None:
    names = ["vision.blocks.0.fc", "text.layers.0.fc", "lm_head"]
    assert {"layer of vision", "layer of text", "elsewhere", "–"} <= set(
        words(error_map(extraction([module(name) for name in names])))
    )


def test_a_hundred_layers_keep_their_labels_apart() -> None:
    drawn = error_map(extraction([module(f"model.layers.{layer}.fc") for layer in range(128)]))
    labels = [mark for mark in drawn.marks if isinstance(mark, Label) and mark.text.isdigit()]
    places = sorted(mark.x for mark in labels)
    assert min(b - a for a, b in pairwise(places)) >= 25
    assert all(mark.x + mark.width <= drawn.width for mark in drawn.marks if isinstance(mark, Rect))


# --- spectra ------------------------------------------------------------------------------------------------


def test_the_modules_chosen_are_the_closest_the_middle_and_the_farthest_from_the_noise() -> None:
    found = [module(f"layers.{n}.fc", sigma_r=0.2 * (1 + n)) for n in (4, 0, 2, 1, 3)]
    assert [one.name for one in chosen_modules(extraction(found))] == ["layers.0.fc", "layers.2.fc", "layers.4.fc"]


def test_modules_of_full_width_are_chosen_only_where_there_are_no_others() -> None:
    full = module("layers.0.gate", sigma_next=None)
    assert [m.name for m in chosen_modules(extraction([full, module("layers.0.fc")]))] == ["layers.0.fc"]
    assert chosen_modules(extraction([full])) == (full,)


def test_a_spectrum_shows_what_is_kept_what_follows_and_the_noise_edge() -> None:
    drawn = spectrum(extraction([module("layers.0.fc")]))
    assert tips(drawn, Dot) == [
        "layers.0.fc\nsingular value 1: 2",
        "layers.0.fc\nsingular value 2: 1.5",
        "layers.0.fc\nsingular value 3: 1",
        "layers.0.fc\nsingular value 4: 0.5",
        "layers.0.fc\nfirst left out: 0.05",
    ]
    assert tips(drawn) == ["noise edge 0.1"]
    assert "rank 4" in words(drawn)


def test_evidence_without_spectra_has_no_chart_of_them_and_the_others_still() -> None:
    old = extraction([module("layers.0.fc", spectra=False)])
    assert spectrum(old) is None
    assert list(card_charts(old)) == ["errors.svg"]
    assert tips(error_map(old)) == ["layers.0.fc\nrelative error 2%, floor 2%: 1"]


def test_a_long_name_is_cut_where_the_next_panel_begins() -> None:
    names = [f"layers.{n}.{'very_' * 12}long_name" for n in range(3)]
    drawn = spectrum(extraction([module(name) for name in names]))
    assert sum(word.endswith("…") for word in words(drawn)) == 3


# --- sizes and shares ---------------------------------------------------------------------------------------


def test_a_layer_s_bar_is_as_high_as_the_squared_norms_of_its_modules_together() -> None:
    drawn = layer_sizes(extraction([module("layers.0.mlp.up"), module("layers.0.attn.q"), module("layers.1.attn.q")]))
    bars = {tip: rect(drawn, tip) for tip in tips(drawn)}
    assert list(bars) == [
        "layers 0, attn\nsquared norm 0.008",
        "layers 0, mlp\nsquared norm 0.008",
        "layers 1, attn\nsquared norm 0.008",
    ]
    low, high, alone = bars.values()
    assert high.y + high.height == pytest.approx(low.y)
    assert low.height == pytest.approx(high.height) == pytest.approx(alone.height)
    assert low.tone == alone.tone != high.tone


def test_more_parts_than_colours_share_the_last() -> None:
    drawn = layer_sizes(extraction([module(f"layers.0.part{n}.fc", update_rms=0.01 * (n + 1)) for n in range(9)]))
    assert "others" in words(drawn)
    assert {mark.tone for mark in drawn.marks if isinstance(mark, Rect)} == {f"b{n}" for n in range(6)}


def test_each_module_s_share_is_a_dot_within_the_frame() -> None:
    shares = {"layers.0.a": 0.75, "layers.0.b": 0.95, "layers.1.a": 1.0}
    drawn = exact_shares(extraction([module(name, exact_share=share) for name, share in shares.items()]))
    dots = [mark for mark in drawn.marks if isinstance(mark, Dot)]
    assert [dot.tip for dot in dots] == [f"{name}\n{100 * share:g}% bit for bit" for name, share in shares.items()]
    assert dots[0].y > dots[1].y > dots[2].y


def test_equal_shares_still_make_an_axis() -> None:
    drawn = exact_shares(extraction([module("layers.0.a", exact_share=1.0), module("layers.1.a", exact_share=1.0)]))
    assert "100%" in words(drawn)


# --- verification -------------------------------------------------------------------------------------------


def test_each_kind_of_question_is_a_row_from_mean_to_greatest_divergence() -> None:
    one = a_set("Set", agreement("choice", mean=1e-5, most=1e-2), agreement("score", mean=1e-6, most=1e-3))
    drawn = divergences(verification(one, fp8=True))
    assert {"Set: choice", "Set: score", "Set, FP8 base: choice", "3 of 1,200"} <= set(words(drawn))
    assert drawn is not None
    first = [mark for mark in drawn.marks if isinstance(mark, Dot)][:3]
    assert [dot.tip.partition("\n")[2] for dot in first] == [
        "mean KL 1e-05 nats",
        "99th percentile KL 0.005 nats",
        "greatest KL 0.01 nats",
    ]
    assert first[0].x < first[1].x < first[2].x


def test_a_divergence_of_zero_has_a_place_of_its_own() -> None:
    drawn = divergences(verification(a_set("Set", agreement("token", mean=0.0, most=0.0))))
    assert drawn is not None
    zero = next(mark for mark in drawn.marks if isinstance(mark, Label) and mark.text == "0")
    assert {mark.x for mark in drawn.marks if isinstance(mark, Dot)} == {zero.x}


def test_no_verification_is_no_chart() -> None:
    assert divergences(None) is None
    assert divergences(verification()) is None


# --- all of them --------------------------------------------------------------------------------------------


def inside(mark: Mark, chart: Chart) -> bool:
    if isinstance(mark, Rect):
        points = [(mark.x, mark.y), (mark.x + mark.width, mark.y + mark.height)]
    elif isinstance(mark, Line):
        points = list(mark.points)
    else:
        points = [(mark.x, mark.y)]
    return all(0 <= x <= chart.width and 0 <= y <= chart.height and math.isfinite(x + y) for x, y in points)


@pytest.mark.parametrize("names", [["lm_head"], ["layers.0.fc"], [f"a.{n}.b.c" for n in range(70)]])
def test_no_mark_leaves_its_chart_and_the_same_evidence_gives_the_same_bytes(names: list[str]) -> None:
    found = extraction([module(name, rank=1 + place % 7) for place, name in enumerate(names)])
    for chart in (error_map(found), spectrum(found), layer_sizes(found), exact_shares(found)):
        assert chart is not None
        assert [mark for mark in chart.marks if not inside(mark, chart)] == []
        assert svg(chart) == svg(chart)
