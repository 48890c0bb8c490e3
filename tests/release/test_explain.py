"""All that is known of one module, told by the evidence alone."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from publisher.cli.console import show_module
from publisher.errors import FetchError, ManifestError
from publisher.records.extraction import ExactRecovery, Extraction, ModuleExtraction
from publisher.release.evidence import Evidence, ReleaseEvidence, read_release
from publisher.release.explain import explain, module_names, nearest, spectrum_bar
from publisher.release.verdict import verdict_on
from tests.factories import extraction, module

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def known(*modules: ModuleExtraction) -> ReleaseEvidence:
    return ReleaseEvidence("One", "", "", (Evidence(extraction=extraction(modules), verification=None),))


def facts(of: ModuleExtraction) -> dict[str, str]:
    """By heading; lines without one go with the one before."""
    found: dict[str, str] = {}
    heading = ""
    for name, text in explain(of.name, known(of))[0].facts:
        heading = name or heading
        found[heading] = f"{found[heading]}\n{text}" if not name else text
    return found


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "level", "why"),
    [
        ({}, "whole", "merge rounding explains"),
        ({"sigma_next": None, "ratio": None}, "whole", "at full width"),
        ({"sigma_next": 0.25}, "short", "the first value left out is 2.5 noise edges high"),
        ({"ratio": 8.0}, "short", "the fit misses 8 times what rounding explains"),
        ({"ratio": 2.4}, "whole", "merge rounding explains"),
    ],
)
def test_a_verdict_says_what_is_missing_and_why(figures: dict[str, Any], level: str, why: str) -> None:
    found = verdict_on(module(Q, **figures))
    assert found.level == level
    assert why in found.why


def test_a_rank_that_may_be_higher_is_doubtful() -> None:
    assert verdict_on(module(Q).model_copy(update={"rank_at_least": True})).level == "doubtful"


# --- which module -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [Q, f"{Q}.weight", "self_attn.q_proj", "q_proj"])
def test_a_module_goes_by_its_name_or_by_an_end_that_no_other_shares(name: str) -> None:
    assert [one.module for one in explain(name, known(module(Q), module(K)))] == [Q]


def test_a_module_of_two_variants_is_told_of_both() -> None:
    one = known(module(Q)).adapters[0]
    both = ReleaseEvidence("Two", "", "", (one, one))
    assert len(explain(Q, both)) == 2


def test_an_end_that_several_share_is_refused_with_their_names() -> None:
    other = "model.layers.1.self_attn.q_proj"
    with pytest.raises(ManifestError) as refused:
        explain("q_proj", known(module(Q), module(other)))
    assert f"2 modules end in 'q_proj'; they are:\n  {Q}\n  {other}\n" in str(refused.value)


@pytest.mark.parametrize("name", ["q_prj", "layers.0.self_atn.q_proj", "model.layers.7.self_attn.q_proj"])
def test_an_unknown_name_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(ManifestError) as refused:
        explain(name, known(module(K), module("model.layers.0.mlp.up"), module(Q)))
    assert f"no module is called '{name}'; the nearest are:\n  {Q}\n" in str(refused.value)


def test_what_resembles_nothing_gets_no_names() -> None:
    assert nearest("zzzz", [Q, K]) == []
    with pytest.raises(ManifestError, match=r"no module is called 'zzzz'\. Expected"):
        explain("zzzz", known(module(Q)))


# --- what is told -------------------------------------------------------------------------------------------


def test_every_figure_of_the_evidence_is_told_with_what_it_means() -> None:
    told = facts(module(Q))
    assert told["verdict"].startswith("whole: ")
    assert told["shape"] == "8 x 10 (out x in), 80 weights"
    assert told["rank"] == "4 of at most 8; found by exact svd"
    assert told["error"] == "2% of the update, factors as shipped; 1 of the floor"
    assert told["singular values"] == "2 to 0.5 kept, then 0.05"
    assert told["noise edge"] == "0.1; the smallest value kept is 5 times as large"
    assert told["update"] == "rms 0.01; 1% of the weights unchanged"
    assert told["bit for bit"] == "80% of the weights, merged and rounded once"
    assert told["tensors"] == (
        f"base_model.model.{Q}.lora_A.weight (4 x 10)\nbase_model.model.{Q}.lora_B.weight (8 x 4)"
    )
    assert "SHA-256 000000" in told["file"]
    assert told["source"].startswith("one at 0000")


def test_a_transposed_and_padded_module_is_told_as_it_is_stored() -> None:
    stored = module(Q).model_copy(update={"transposed": True, "alpha": 6})
    told = facts(stored)
    assert told["shape"] == "8 x 10 (in x out, as stored), 80 weights"
    assert told["rank"] == "4 of at most 8, padded to 6; found by exact svd"
    assert "lora_A.weight (6 x 8)" in told["tensors"]


def test_the_exact_method_tells_how_the_release_was_merged() -> None:
    recovery = ExactRecovery(
        arithmetic="one rounding",
        told_apart=False,
        other_share=None,
        rank_shown=4,
        svd_share=0.8,
        float32_share=0.9999,
        share=0.9,
        iterations=1,
        ended="settled",
        residual=12,
    )
    told = facts(module(Q).model_copy(update={"recovery": recovery}))
    assert told["merged by"] == "one rounding, as far as can be told"
    assert told["exact method"].endswith("90% as shipped; settled after 1 iteration")
    assert told["residual"] == "12 elements in residual.safetensors"


def test_the_bar_falls_from_full_height_to_the_noise_edge() -> None:
    assert spectrum_bar(module(Q, sigma_1=10.0, sigma_r=0.1, rank=2)) == "█▁"
    bars = spectrum_bar(module(Q, rank=100))
    assert len(bars) == 32
    assert list(bars) == sorted(bars, reverse=True)


def test_evidence_without_spectra_is_told_without_a_bar() -> None:
    assert "spectrum" not in facts(module(Q, spectra=False))


def test_names_for_a_shell_are_all_modules_once() -> None:
    part = known(module(Q), module(K)).adapters[0]
    assert module_names(ReleaseEvidence("", "", "", (part, part))) == [K, Q]


# --- on a terminal and in a pipe ----------------------------------------------------------------------------


def shown(*, width: int | None) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=width is not None, width=width, color_system=None)
    show_module(explain(Q, known(module(Q)))[0], console)
    return out.getvalue()


def test_a_narrow_terminal_gets_no_line_beyond_its_width_but_for_words_that_cannot_be_broken() -> None:
    lines = shown(width=40).splitlines()
    assert [line for line in lines if len(line) > 40 and "lora_" not in line and len(line.split()[-1]) < 23] == []
    assert "verdict          whole: what is missing" in lines


def test_a_pipe_gets_each_fact_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    text = shown(width=None)
    told = explain(Q, known(module(Q)))[0]
    assert [line for line in text.splitlines()[3:] if line] == [f"{name:<17}{what}" for name, what in told.facts]
    assert "\x1b" not in text


# --- where the evidence comes from --------------------------------------------------------------------------


def test_a_folder_is_read_with_its_subfolders_and_without_a_manifest(tmp_path: Path) -> None:
    for name, label in (("", "One"), ("small", "Two")):
        made = extraction([module(Q)]).model_copy(update={"label": label})
        made.write(tmp_path / name / "extraction.json")
    found = read_release(None, tmp_path, staged=None)
    assert found.title == tmp_path.name
    assert [part.extraction.label for part in found.adapters] == ["One", "Two"]
    assert Extraction.read(tmp_path / "extraction.json") == found.adapters[0].extraction


def test_a_folder_without_evidence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=r"holds no extraction\.json"):
        read_release(None, tmp_path, staged=None)


def test_neither_and_both_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="neither --manifest nor --folder"):
        read_release(None, None, staged=None)
    with pytest.raises(ManifestError, match="both --manifest and --folder"):
        read_release(tmp_path / "m.yaml", tmp_path, staged=tmp_path)
