"""The card, from evidence whose figures are made up for these tests: they claim nothing about any model."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from publisher import __version__
from publisher.errors import CardError, FetchError
from publisher.manifest.reading import load_manifest, read_manifest
from publisher.manifest.schema import Fp8Base, Manifest, Reference, RequestSet, Variant, VerificationSettings
from publisher.records.checkpoint import Checkpoint, FileDigest, QuantisedBase
from publisher.records.closure import closure
from publisher.records.extraction import (
    Carried,
    CountedArithmetic,
    Extraction,
    ExtractionSummary,
    LeftOut,
    ModuleExtraction,
    RankCount,
    Settings,
    Spread,
    Tools,
)
from publisher.records.files import packaged_folder
from publisher.records.loaders import LoaderFinding, Loaders, LoaderVerdict
from publisher.records.verification import Fp8Verification, Limits, Verification, VerificationSet
from publisher.release.card import check_card, render_card, stamp
from publisher.release.evidence import VariantEvidence, load_evidence
from publisher.release.filters import count, extent, figure, grouped, percent, points, size
from publisher.verification.metrics import AnswerPair, set_metrics
from tests import factories

if TYPE_CHECKING:
    from publisher.records.record import Record

MANIFESTS = Path(__file__).parents[2] / "manifests"
GOLDEN = Path(__file__).parents[1] / "golden"

LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
FULL_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NARROW = ("in_proj_a", "in_proj_b")


# --- test evidence ------------------------------------------------------------------------------------------


def module(name: str, *, rank: int, narrow: int) -> ModuleExtraction:
    full = name.endswith(NARROW)
    return factories.module(
        name,
        rank=narrow if full else rank,
        shape=(narrow, 5120) if full else (5120, 5120),
        method="exact svd" if full else "randomized svd",
        fit_error=0.0311,
        relative_error=0.0317,
        rounding_floor=0.0322,
        expected_error=0.0309,
        ratio=None if full else 1.0064,
        sigma_1=3.1,
        sigma_r=0.21,
        sigma_next=None if full else 0.0088,
        noise_edge=0.0089,
        update_rms=6.1e-4,
        exact_share=0.8312,
        unchanged_share=0.0417,
    )


def modules(layers: range, *, rank: int, narrow: int) -> tuple[ModuleExtraction, ...]:
    return tuple(
        module(f"model.language_model.layers.{layer}.{part}", rank=rank, narrow=narrow)
        for layer in layers
        for part in (FULL_ATTENTION if layer % 4 == 3 else LINEAR_ATTENTION) + MLP
    )


def digest(name: str, size: int) -> FileDigest:
    return FileDigest(name=name, size=size, sha256=f"{size:064x}")


def summary(found: tuple[ModuleExtraction, ...], *, layers: str, total: int) -> ExtractionSummary:
    ranks = sorted({m.rank for m in found}, reverse=True)
    return ExtractionSummary(
        linears=len(found),
        layers=layers,
        layers_total=total,
        rank=ranks[0],
        ranks=tuple(
            RankCount(
                rank=rank,
                modules=sum(m.rank == rank for m in found),
                names=tuple(sorted({m.name.rpartition(".")[2] for m in found if m.rank == rank})),
            )
            for rank in ranks
        ),
        tensors_equal=997 + total,
        tensors_base_only=("mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.norm.weight"),
        left_out=(),
        parameters=660_012_345 + total,
        adapter=digest("adapter_model.safetensors", 1_320_024_690 + total * 1_000_000),
        config=digest("adapter_config.json", 20_321),
        relative_error=Spread(min=0.00213, median=0.0191, max=0.0397 + total / 1e4),
        fit_error=Spread(min=0.0021, median=0.0189, max=0.0391),
        rounding_floor=Spread(min=0.00219, median=0.0194, max=0.0408),
        ratio=Spread(min=0.981, median=1.0, max=1.0313),
        update_rms=Spread(min=2.2e-4, median=6.1e-4, max=9.7e-4),
        energy=0.9996,
        approximation=False,
        exact_share=0.8537 - total / 1e4,
        exact_share_modules=Spread(min=0.791, median=0.8521, max=0.9013),
    )


def known(reference: Reference) -> Checkpoint:
    files = (digest("model.safetensors", 55_000_000_000),)
    if reference.repo and reference.revision:
        return Checkpoint(kind="hub", name=reference.repo, revision=reference.revision, files=files)
    name = reference.where.rpartition("/")[2]
    return Checkpoint(kind="local", name=name, revision=f"{len(name):02d}ab" * 16, files=files)


def loader(name: Any, **fields: Any) -> LoaderVerdict:
    plain: dict[str, Any] = {"version": "0.9.1", "basis": "read", "loads": "yes", "scale": "right"}
    return LoaderVerdict(**{"loader": name, "flags": (), "findings": (), "notes": (), **plain, **fields})


def loaders(rank: int, narrow: int) -> tuple[LoaderVerdict, ...]:
    what = f"{narrow} modules at {rank / narrow:.3g} times the scale: one alpha for all"
    wrong = LoaderFinding(kind="wrong scale", what=what, modules=narrow, silent=True, remedy="layout: uniform")
    other = LoaderFinding(kind="other format", what="it is no PEFT", modules=0, silent=False, remedy="convert")
    return (
        loader("PEFT", version="0.21.9", basis="executed", notes=("on Qwen3_5ForCausalLM it is refused",)),
        loader("vLLM", flags=("--enable-lora", f"--max-lora-rank {rank}")),
        loader("llama.cpp", version="0b03adaa", loads="wrongly", scale="wrong", findings=(wrong,)),
        loader("MLX", loads="no", scale="none", findings=(other,)),
    )


def extraction(variant: Variant, *, rank: int, narrow: int) -> Extraction:
    first, last = (int(layer) for layer in str(variant.expect.layers).split("-"))
    found = modules(range(first, last + 1), rank=rank, narrow=narrow)
    settings = dict(variant.adapter) | {"model_class": variant.model_class}
    packages = {"torch": "2.13.0+cpu", "numpy": "2.4.1"}
    return Extraction(
        path=variant.path,
        label=variant.label,
        source=known(variant.source),
        base=known(variant.base),
        settings=Settings(**settings),
        tools=Tools(
            publisher="0.0.1.test", commit="c0ffee11" * 5, dirty=False, code="5" * 64, device="cpu", packages=packages
        ),
        summary=summary(found, layers=f"{first}-{last}", total=last + 1),
        modules=found,
    )


FILES = {"Invented requests 0.4.2": "invented/requests.jsonl", "Invented pictures, 11 sets": "invented/pictures.jsonl"}
FP8 = Fp8Base(repo="Qwen/Qwen3.8-27B-FP8", revision="f8" * 20)


def verified(variant: Variant) -> Variant:
    """The variant, asking for the verification below."""
    sets = tuple(RequestSet(name=name, file=file) for name, file in FILES.items())
    asked = VerificationSettings(runner="decision", trust_remote_code=True, sets=sets)
    return variant.model_copy(update={"verification": asked, "fp8": FP8})


def verification(made: Extraction) -> Verification:
    return Verification(
        path=made.path,
        adapter_sha256=made.summary.adapter.sha256,
        runner="decision",
        device="cpu",
        dtype="bfloat16",
        packages={"torch": "2.13.0+cpu"},
        sets=(
            answered("Invented requests 0.4.2", 2203, flips=37),
            answered("Invented pictures, 11 sets", 101, flips=0),
        ),
    )


def on_fp8(made: Extraction) -> Verification:
    first, second = verification(made).sets
    sets = (answered(first.name, 2203, flips=61), second)
    fp8 = Fp8Verification(base=known(FP8), against="base", linears=186, sets=sets)
    return verification(made).model_copy(update={"fp8": fp8})


@cache
def answered(name: str, questions: int, *, flips: int) -> VerificationSet:
    """A set of so many questions of two types, of which some flip in both directions, and some more fail."""
    yes, no = np.array([-1.0, 1.0]), np.array([0.02, -0.02])
    pairs = []
    for index in range(questions):
        flip, kind = index < flips, ("noul", "choice")[index % 2]
        one, other = (no, -no) if flip else (yes, yes + np.array([0.001 * (index % 7), 0.0]))
        facts: dict[str, Any] = {"kind": kind, "benchmark": "ab"[index % 2], "gold": int(index % 3 > 0)}
        pairs.append(AnswerPair(f"{index // 2}", "q", reference=one, candidate=other, **facts))
    lost = AnswerPair("lost", "q", "noul", "", reference=yes, candidate=None, candidate_failure="too long")
    return set_metrics(name, [*pairs, *[lost] * (3 if flips else 0)], file=digest(FILES[name], questions))


def clef() -> tuple[Manifest, tuple[VariantEvidence, ...]]:
    """The first variant verified, the second not, so that one card shows both."""
    manifest = load_manifest(MANIFESTS / "clef.yaml")
    large, small = verified(manifest.variants[0]), manifest.variants[1]
    manifest = manifest.model_copy(update={"variants": (large, small)})
    first = extraction(large, rank=256, narrow=48)
    second = extraction(small, rank=256, narrow=32)
    return manifest, (
        VariantEvidence(variant=large, extraction=first, verification=on_fp8(first), loaders=loaders(256, 48)),
        VariantEvidence(variant=small, extraction=second, verification=None, loaders=loaders(256, 32)),
    )


def demo() -> tuple[Manifest, tuple[VariantEvidence, ...]]:
    manifest = load_manifest(MANIFESTS / "demo.yaml")
    return manifest, tuple(
        VariantEvidence(
            variant=variant,
            extraction=extraction(variant, rank=12, narrow=6),
            verification=None,
            loaders=loaders(12, 6),
        )
        for variant in manifest.variants
    )


def render(manifest: Manifest, evidence: tuple[VariantEvidence, ...]) -> str:
    """The card without its last line, which says who rendered it."""
    return render_card(manifest, evidence, beside=MANIFESTS).removesuffix(f"\n{stamp()}\n")


@pytest.fixture(params=[clef, demo], ids=["clef", "demo"])
def case(request: pytest.FixtureRequest) -> tuple[Manifest, tuple[VariantEvidence, ...]]:
    make: Callable[[], tuple[Manifest, tuple[VariantEvidence, ...]]] = request.param
    return make()


def with_summary(evidence: VariantEvidence, **changes: Any) -> VariantEvidence:
    changed = evidence.extraction.summary.model_copy(update=changes)
    made = evidence.extraction.model_copy(update={"summary": changed})
    return VariantEvidence(
        variant=evidence.variant, extraction=made, verification=evidence.verification, loaders=evidence.loaders
    )


# --- the text -----------------------------------------------------------------------------------------------


def body(card: str) -> str:
    return card.split("\n---\n", maxsplit=1)[1]


def usage_code(card_text: str) -> tuple[str, ...]:
    """The Python blocks of a card, in their order."""
    return tuple(re.findall(r"^```python\n(.*?)^```$", card_text, flags=re.DOTALL | re.MULTILINE))


def test_the_clef_card_reads_as_kept(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "clef_card.md", render(*clef()))


def test_the_demo_card_reads_as_kept(golden: Callable[[Path, str], None]) -> None:
    golden(GOLDEN / "demo_card.md", render(*demo()))


def test_a_card_is_the_same_each_time_and_clean_at_every_end(
    case: tuple[Manifest, tuple[VariantEvidence, ...]],
) -> None:
    card = render(*case)
    assert card == render(*case)
    assert card.endswith("\n")
    assert not card.endswith("\n\n")
    assert not [line for line in card.split("\n") if line != line.rstrip()]


def test_a_card_says_in_its_last_line_who_rendered_it() -> None:
    last = render_card(*demo(), beside=MANIFESTS).splitlines()[-1]
    assert last == stamp()
    assert re.fullmatch(rf"<!-- Rendered by publisher {re.escape(__version__)}, card [0-9a-f]{{12}}\. -->", last)


@pytest.mark.parametrize(
    "module",
    ["release.filters", "release.charts", "release.svg", "release.templating", "records.formats", "border.escape"],
)
def test_the_stamp_rests_on_all_code_that_writes_a_word_or_a_figure_of_the_card(module: str) -> None:
    assert f"{module.replace('.', '/')}.py" in closure("publisher.release.card")


def test_other_code_is_another_card(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stamp()
    monkeypatch.setattr("publisher.release.card.code_digest", lambda name: f"other code of {name}")
    assert stamp() != before


def test_another_template_is_another_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stamp()
    shutil.copytree(packaged_folder("templates"), tmp_path / "templates")
    monkeypatch.setattr("publisher.release.card.packaged_folder", lambda name: tmp_path / name)
    assert stamp() == before
    usage = tmp_path / "templates" / "usage_peft.md.j2"
    usage.write_text(usage.read_text(encoding="utf-8") + "Enjoy.\n", encoding="utf-8")
    assert stamp() != before


def test_every_table_of_the_rendered_page_is_whole(case: tuple[Manifest, tuple[VariantEvidence, ...]]) -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(body(render(*case)))
    rows = "".join(
        {"tr_open": "\n", "th_open": "h", "td_open": "d", "table_open": "\n"}.get(t.type, "") for t in tokens
    )
    tables = [table.split("\n") for table in rows.strip().split("\n\n")]
    assert len(tables) == (11 if case[1][0].verification else 3)
    assert all(len({len(row) for row in table}) == 1 for table in tables)
    prose = [t.content for t in tokens if t.type == "inline" and "|" in t.content]
    assert not prose, "a table row fell out of its table"


def test_a_bar_in_a_name_breaks_no_table() -> None:
    manifest, evidence = clef()
    made = evidence[0].verification
    assert made is not None
    renamed = made.model_copy(update={"sets": (made.sets[0].model_copy(update={"name": "yes | no"}),)})
    card = render(
        manifest,
        (
            VariantEvidence(variant=evidence[0].variant, extraction=evidence[0].extraction, verification=renamed),
            evidence[1],
        ),
    )
    assert r"| yes \| no, 1,103 requests" in card


# --- every figure is in an artefact -------------------------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[<>]?\d+(?:[.,]\d+)*(?:e[+-]\d+)?(?:%| [kMG]B)?(?!\w)")
WORD_WITH_DIGIT = re.compile(r"(?<!\w)(?=\w*\d)\w+")
VOCABULARY = {"fp32", "conv1d", "FP8", "99th"}
FIGURES = {"ratio", "max_kl", "mean_kl", "p99_kl", "max_probability_difference", "p_value", "ece", "brier", "nll"}


def leaves(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*place, str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from leaves(inner, place)
    else:
        yield place, value


def judged(item: VariantEvidence) -> Loaders:
    """The loaders.json of this evidence."""
    summary = item.extraction.summary
    return Loaders(
        path=item.extraction.path,
        adapter_sha256=summary.adapter.sha256,
        config_sha256=summary.config.sha256,
        verdicts=item.loaders,
    )


def artefacts(manifest: Manifest, evidence: tuple[VariantEvidence, ...]) -> dict[str, Any]:
    """What the card may draw on; single modules are left out, since it quotes none."""
    records: list[Record] = [record for item in evidence for record in (item.extraction, judged(item))]
    records += [item.verification for item in evidence if item.verification]
    dumped = [record.model_dump(mode="json") for record in records]
    return {"manifest": manifest.model_dump(mode="json"), "records": [d | {"modules": None} for d in dumped]}


def forms(place: tuple[str, ...], value: Any) -> set[str]:
    """The display forms of docs/card.md."""
    if isinstance(value, str):
        return set(NUMBER.findall(value))
    if isinstance(value, bool) or value is None:
        return set()
    if isinstance(value, int):
        return {size(value)} if place[-1] == "size" else {count(value)}
    if place[-1] in {"difference", "mean_difference", "interval"}:
        return set(NUMBER.findall(points(value)))
    return {figure(value)} if FIGURES & set(place) else {percent(value)}


def unexplained(text: str, manifest: Manifest, evidence: tuple[VariantEvidence, ...]) -> list[str]:
    """Every number, and every word with a digit in it, that stands in no artefact."""
    known = list(leaves(artefacts(manifest, evidence)))
    lengths = {count(len(item.extraction.summary.tensors_base_only)) for item in evidence}
    flagged = {count(sum(m.rank_at_least for m in item.extraction.modules)) for item in evidence}
    allowed = set().union(lengths, flagged, *(forms(place, value) for place, value in known))
    strings = [value for _, value in known if isinstance(value, str)]
    words = WORD_WITH_DIGIT.findall(NUMBER.sub("", text))
    strange = [word for word in words if word not in VOCABULARY and not any(word in string for string in strings)]
    return [number for number in NUMBER.findall(text) if number not in allowed] + strange


def test_every_figure_of_a_card_is_in_an_artefact(case: tuple[Manifest, tuple[VariantEvidence, ...]]) -> None:
    text = body(render(*case))
    assert len(NUMBER.findall(text)) > 30
    assert unexplained(text, *case) == []


def altered(text: str) -> Iterator[tuple[str, str]]:
    """Each number of the text with its last digit doubled, and the text that has it so."""
    for match in NUMBER.finditer(text):
        last = max(i for i in range(match.start(), match.end()) if text[i].isdigit())
        longer = f"{text[:last]}{text[last]}{text[last:]}"
        yield longer[match.start() : match.end() + 1], longer


def test_a_card_with_any_one_number_altered_is_noticed(case: tuple[Manifest, tuple[VariantEvidence, ...]]) -> None:
    for number, text in altered(body(render(*case))):
        assert unexplained(text, *case) == [number]


@pytest.mark.parametrize(
    "changes",
    [
        {"linears": 185},
        {"layers": "41-62"},
        {"rank": 255},
        {"tensors_equal": 1062},
        {"tensors_base_only": ("mtp.fc.weight", "mtp.norm.weight")},
        {"parameters": 660_012_408},
        {"adapter": digest("adapter_model.safetensors", 1_390_000_000)},
        {"relative_error": Spread(min=0.00213, median=0.0192, max=0.0461)},
        {"rounding_floor": Spread(min=0.00219, median=0.0195, max=0.0408)},
        {"ratio": Spread(min=0.981, median=1.01, max=1.0313)},
        {"exact_share": 0.8474},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_card_made_from_other_figures_is_noticed(changes: dict[str, Any]) -> None:
    manifest, (first, second) = clef()
    card = render(manifest, (with_summary(first, **changes), second))
    assert unexplained(body(card), manifest, (first, second))


def test_an_altered_commit_or_an_invented_word_with_a_figure_is_noticed() -> None:
    manifest, evidence = clef()
    text = body(render(manifest, evidence))
    assert unexplained(text.replace("@ed3eed33", "@ed3eed34"), manifest, evidence) == ["ed3eed34"]
    assert unexplained(f"{text}\nMeasured on H200.", manifest, evidence) == ["H200"]


# --- what the card says -------------------------------------------------------------------------------------


def test_each_variant_has_one_complete_block_of_python(case: tuple[Manifest, tuple[VariantEvidence, ...]]) -> None:
    blocks = usage_code(render(*case))
    assert len(blocks) == len(case[0].variants)
    for block, variant in zip(blocks, case[0].variants, strict=True):
        compile(block, variant.path, "exec")
        assert f"import AutoProcessor, {variant.model_class}\n" in block or f"import {variant.model_class}\n" in block
        assert f'"{variant.base.where}"' in block
        assert ("subfolder=" in block) == bool(variant.folder)


def test_usage_pins_what_is_on_the_hub_and_only_that() -> None:
    pinned = usage_code(render(*clef()))[1]
    assert 'revision="c202236235762e1c871ad0ccb60c8ee5ba337b9a"' in pinned
    assert 'revision="8b2e5fd17c09fd49bc2880b805d5323ec7ff4ff3"' in pinned
    assert "revision" not in usage_code(render(*demo()))[1]


def test_the_decision_head_of_a_local_release_is_read_from_its_folder() -> None:
    manifest, evidence = demo()
    head = manifest.card.model_copy(update={"usage": "usage_decision_head.md.j2"})
    block = usage_code(render(manifest.model_copy(update={"card": head}), evidence))[1]
    compile(block, "block", "exec")
    assert 'release = Path("demo/clef-flash")' in block
    assert "snapshot_download" not in block


def test_a_text_only_class_is_not_warned_about_itself() -> None:
    manifest, evidence = demo()
    causal = manifest.variants[0].model_copy(update={"model_class": "LlamaForCausalLM"})
    manifest = manifest.model_copy(update={"variants": (causal,)})
    card = render(manifest, (VariantEvidence(variant=causal, extraction=evidence[0].extraction, verification=None),))
    assert "AutoModelForCausalLM" not in card
    assert "AutoModelForCausalLM" in render(*demo())


def test_a_variant_without_verification_says_so_by_name() -> None:
    card = render(*clef())
    assert "No verification was run for Clef-flash (9B):" in card
    assert "No verification was run for Clef in small, Clef-flash in small:" in render(*demo())


def test_a_fully_verified_card_speaks_of_no_gap() -> None:
    manifest, evidence = clef()
    full = tuple(
        VariantEvidence(variant=item.variant, extraction=item.extraction, verification=verification(item.extraction))
        for item in evidence
    )
    card = render(manifest, full)
    assert "No verification" not in card
    assert "| Clef-flash (9B) | Invented pictures, 11 sets, 51 requests (101 questions) | 0% (0) |" in card


def test_a_verification_without_a_test_set_counts_as_none() -> None:
    manifest, evidence = clef()
    made = evidence[0].extraction
    empty = verification(made).model_copy(update={"sets": ()})
    card = render(
        manifest, (VariantEvidence(variant=evidence[0].variant, extraction=made, verification=empty), evidence[1])
    )
    assert "No verification was run for Clef (27B), Clef-flash (9B):" in card


def test_a_tensor_left_out_is_named_with_its_reason() -> None:
    manifest, (first, second) = clef()
    left_out = (LeftOut(name="model.language_model.norm.weight", reason="adapter.ignore\nnames it"),)
    card = render(manifest, (with_summary(first, left_out=left_out), second))
    assert (
        "- Not in the Clef (27B) adapter, though it differs from the base: `model.language_model.norm.weight`" in card
    )
    assert "(adapter.ignore names it)." in card
    assert "is equal in both, but for those named below." in card


def test_a_module_carried_whole_is_named_with_its_share_and_who_refuses_it() -> None:
    manifest, (first, second) = clef()
    head = Carried(module="lm_head", tensors=("head.w",), tied=("embed",), parameters=9, norm=1.5, share=0.25)
    card = render(manifest, (with_summary(first, carried=(head,)), second))
    assert (
        "- Whole in the Clef (27B) adapter, as `modules_to_save`: `lm_head` (25.00% of the update; "
        "its weight is shared by `embed`)." in card
    )
    assert "vLLM refuses an adapter that has them" in card
    assert "is equal in both, but for those named below." in card


def test_the_card_says_in_which_dtype_the_base_is_loaded_where_the_merge_was_not_the_usual_one() -> None:
    manifest, (first, second) = clef()
    wide = CountedArithmetic(merged_in="float32", rounded_to="bfloat16", modules=184)
    safe = CountedArithmetic(merged_in="bfloat16", rounded_to="bfloat16", roundings="update rounded first", modules=2)
    unusual = with_summary(first, merge_arithmetic=(wide, safe))
    text = " ".join(render(manifest, (unusual, second)).split())
    assert "184 linears: the release was merged in float32, with the base not cast before, and then" in text
    assert "load the base with `dtype=torch.float32`, merge, and cast the result to `torch.bfloat16`" in text
    assert "2 linears: the release was merged in bfloat16, with the update rounded before it was added, as" in text
    assert "`merge_and_unload(safe_merge=True)` does" in text
    assert "merged as the release was" in text
    assert not unexplained(body(render(manifest, (unusual, second))), manifest, (unusual, second))


def test_the_card_of_a_qlora_loads_the_base_in_its_quantisation_and_says_why() -> None:
    manifest, (first, second) = clef()
    how = QuantisedBase(kind="nf4", double=True, dtype="bfloat16", tensors=("a.weight", "b.weight"))
    quantised = with_summary(first, base_quantisation=how)
    card = render(manifest, (quantised, second))
    text = " ".join(card.split())
    assert "NF4 of bitsandbytes, with double quantisation, dequantised to bfloat16" in text
    assert "2 linears. Those without an adapter are the dequantised base's in every bit" in text
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "BitsAndBytesConfig(" in block)
    settings = {"load_in_4bit": "True", "bnb_4bit_quant_type": '"nf4"', "bnb_4bit_use_double_quant": "True"}
    assert all(f"{name}={value}," in code for name, value in settings.items())
    compile(code, "usage", "exec")


def test_the_card_says_with_what_the_adapters_load_and_what_stands_in_the_way() -> None:
    card = render(*clef())
    flags = "yes, with `--enable-lora --max-lora-rank 256`; scale right"
    assert f"| vLLM | 0.9.1, read | {flags} | {flags} |\n" in card
    assert "| llama.cpp | 0b03adaa, read | wrongly; scale wrong | wrongly; scale wrong |\n" in card
    assert "| MLX | 0.9.1, read | no | no |\n" in card
    assert "- Clef (27B), llama.cpp: 48 modules at 5.33 times the scale: one alpha for all.\n" in card
    assert "- Clef (27B), PEFT: on Qwen3_5ForCausalLM it is refused.\n" in card


def test_a_variant_without_verdicts_has_no_column_and_a_card_without_any_no_table() -> None:
    manifest, (first, second) = clef()
    old = VariantEvidence(variant=second.variant, extraction=second.extraction, verification=None)
    one = render(manifest, (first, old))
    assert "| Loader | Rules of | Clef (27B) |\n" in one
    bare = VariantEvidence(
        variant=first.variant,
        extraction=first.extraction,
        verification=first.verification,
    )
    assert "Loads with" not in render(manifest, (bare, old))


def test_adapters_that_load_everywhere_have_nothing_in_their_way() -> None:
    manifest, evidence = demo()
    fine = tuple(
        VariantEvidence(
            variant=e.variant,
            extraction=e.extraction,
            verification=None,
            loaders=(loader("PEFT"), loader("vLLM")),
        )
        for e in evidence
    )
    card = render(manifest, fine)
    assert "### Loads with" in card
    assert "<details>" not in card


def test_exports_are_named_with_their_size_and_the_way_to_load_them() -> None:
    manifest, (first, second) = demo()
    sizes = {"adapter_model.gguf": 2_771_234_567, "mlx/adapters.safetensors": 1_385_234_567}
    sizes |= {"mlx/adapter_config.json": 512}
    settings = second.extraction.settings.model_copy(update={"exports": ("gguf", "mlx")})
    made = with_summary(second, exports=tuple(digest(name, octets) for name, octets in sizes.items()))
    made = VariantEvidence(
        variant=made.variant, extraction=made.extraction.model_copy(update={"settings": settings}), verification=None
    )
    card = render(manifest, (first, made))
    assert "for other loaders: `adapter_model.gguf` (2.77 GB), `mlx/adapters.safetensors` (1.39 GB)." in card
    assert "Clef-flash in small in llama.cpp and mlx-lm, after `hf download demo/clef-lora" in card
    assert card.count("--lora adapter/clef-flash/adapter_model.gguf") == 1
    assert "--model demo/clef-flash-base --adapter-path adapter/clef-flash/mlx" in card
    assert unexplained(card, manifest, (first, made)) == []
    only = made.extraction.model_copy(update={"settings": settings.model_copy(update={"exports": ("mlx",)})})
    assert "--lora adapter" not in render(
        manifest, (first, VariantEvidence(variant=made.variant, extraction=only, verification=None))
    )


def test_an_approximation_is_called_one_with_the_share_of_the_update_it_holds() -> None:
    manifest, (first, second) = clef()
    card = render(manifest, (with_summary(first, approximation=True, energy=0.912345), second))
    assert "**The Clef (27B) adapter is an approximation.** The update has no low rank" in card
    assert "the adapter holds 91.23% of it" in card
    assert "Clef-flash (9B) adapter is an approximation" not in card


def test_a_uniform_adapter_speaks_of_padding_and_of_no_pattern() -> None:
    manifest, (first, second) = demo()
    settings = first.extraction.settings.model_copy(update={"layout": "uniform"})
    padded = first.extraction.model_copy(update={"settings": settings})
    card = render(manifest, (VariantEvidence(variant=first.variant, extraction=padded, verification=None), second))
    line = next(line for line in card.splitlines() if line.startswith("- `/`"))
    assert "Narrower, zero-padded to `r`: 36 linears" in line
    assert "pattern" not in line


def test_an_adapter_of_one_rank_speaks_of_no_other() -> None:
    manifest, (first, second) = demo()
    one = (RankCount(rank=12, modules=186, names=("q_proj",)),)
    card = render(manifest, (with_summary(first, ranks=one), second))
    assert "- `/` is a PEFT LoRA in bfloat16 with `r` = `lora_alpha` = 12.\n" in card


def test_a_rank_that_may_be_higher_is_admitted() -> None:
    manifest, (first, second) = demo()
    doubtful = first.extraction.modules[0].model_copy(update={"rank_at_least": True})
    made = first.extraction.model_copy(update={"modules": (doubtful, *first.extraction.modules[1:])})
    assert "| Linears whose true rank may be higher | 1 | 0 |" in render(
        manifest, (VariantEvidence(variant=first.variant, extraction=made, verification=None), second)
    )
    assert "may be higher" not in render(*demo())


def test_an_adapter_at_full_width_throughout_has_no_ratio() -> None:
    manifest, (first, second) = demo()
    assert "what rounding explains | – | 0.981 / 1.00 / 1.03 |" in render(
        manifest, (with_summary(first, ratio=None), second)
    )


def test_uncommitted_changes_of_the_tool_are_admitted() -> None:
    manifest, (first, second) = demo()
    tools = first.extraction.tools.model_copy(update={"dirty": True})
    bare = second.extraction.tools.model_copy(update={"commit": None, "dirty": None})
    made = first.extraction.model_copy(update={"tools": tools}), second.extraction.model_copy(update={"tools": bare})
    card = render(
        manifest,
        (
            VariantEvidence(variant=first.variant, extraction=made[0], verification=None),
            VariantEvidence(variant=second.variant, extraction=made[1], verification=None),
        ),
    )
    assert "publisher 0.0.1.test (c0ffee11, with uncommitted changes), torch 2.13.0+cpu |" in card
    assert "| publisher 0.0.1.test, torch 2.13.0+cpu |" in card


# --- the header ---------------------------------------------------------------------------------------------


def header(card: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return loaded


def test_the_header_tells_the_hub_what_the_repository_is() -> None:
    assert header(render(*clef())) == {
        "base_model": ["Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-9B"],
        "base_model_relation": "adapter",
        "library_name": "peft",
        "license": "apache-2.0",
        "pipeline_tag": "image-text-to-text",
        "tags": ["lora", "peft", "transformers"],
    }


def test_a_local_base_is_not_passed_off_as_a_repository() -> None:
    assert not {"base_model", "base_model_relation"} & set(header(render(*demo())))


@pytest.mark.parametrize(
    ("classes", "tag"),
    [
        (("Qwen3_5ForConditionalGeneration", "Qwen3_5ForConditionalGeneration"), "image-text-to-text"),
        (("LlamaForCausalLM", "Qwen3ForCausalLM"), "text-generation"),
        (("LlamaForCausalLM", "Qwen3_5ForConditionalGeneration"), None),
        (("BertModel", "BertModel"), None),
        (("ViTForImageClassification", "ViTForImageClassification"), "image-classification"),
        (("Wav2Vec2ForCTC", "Wav2Vec2ForCTC"), "automatic-speech-recognition"),
    ],
)
def test_the_pipeline_tag_follows_the_classes_where_they_agree(classes: tuple[str, str], tag: str | None) -> None:
    manifest, evidence = demo()
    variants = tuple(v.model_copy(update={"model_class": c}) for v, c in zip(manifest.variants, classes, strict=True))
    card = render(manifest.model_copy(update={"variants": variants}), evidence)
    assert header(card).get("pipeline_tag") == tag


@pytest.mark.parametrize(
    ("model_class", "task_type", "tag"),
    [
        ("WhisperForConditionalGeneration", None, "automatic-speech-recognition"),
        ("T5ForConditionalGeneration", "SEQ_2_SEQ_LM", None),
        ("BertForSequenceClassification", "SEQ_CLS", "text-classification"),
        ("Wav2Vec2ForSequenceClassification", None, None),
    ],
)
def test_a_class_for_speech_or_seq2seq_is_not_passed_off_as_one_for_images_or_text(
    model_class: str, task_type: str | None, tag: str | None
) -> None:
    manifest, evidence = demo()
    variants = tuple(
        v.model_copy(
            update={"model_class": model_class, "adapter": v.adapter.model_copy(update={"task_type": task_type})}
        )
        for v in manifest.variants
    )
    both = tuple(replace(one, variant=variant) for one, variant in zip(evidence, variants, strict=True))
    card = render(manifest.model_copy(update={"variants": variants}), both)
    assert header(card).get("pipeline_tag") == tag
    assert task_type or "text-only model that `AutoModelForCausalLM`" not in card


# --- templates ----------------------------------------------------------------------------------------------


def own_template(folder: Path, text: str) -> tuple[Manifest, tuple[VariantEvidence, ...]]:
    (folder / "own_card.md.j2").write_text(text, encoding="utf-8")
    manifest, evidence = demo()
    return manifest.model_copy(
        update={"card": manifest.card.model_copy(update={"template": "own_card.md.j2"})}
    ), evidence


def test_a_template_variable_that_is_missing_fails(tmp_path: Path) -> None:
    case = own_template(tmp_path, "# {{ manifest.card.title }}\n{{ nowhere }}\n")
    with pytest.raises(CardError, match=r"own_card\.md\.j2 cannot be rendered: 'nowhere' is undefined.*docs/card\.md"):
        render_card(*case, beside=tmp_path)


def test_a_template_that_is_not_jinja_fails_with_its_line(tmp_path: Path) -> None:
    case = own_template(tmp_path, "# Title\n\n{% for %}\n")
    with pytest.raises(CardError, match=r"\(own_card\.md\.j2, line 3\)"):
        render_card(*case, beside=tmp_path)


def test_a_template_beside_the_manifest_may_use_the_packaged_parts(tmp_path: Path) -> None:
    case = own_template(
        tmp_path,
        "# Ours\n{% for item in evidence %}{% set variant, first = item.variant, loop.first %}\n"
        "{% include manifest.card.usage %}{% endfor %}\n\n\n",
    )
    card = render_card(*case, beside=tmp_path)
    assert body(card).startswith("\n# Ours\n")
    assert card.endswith(f"```\n\n{stamp()}\n")
    assert len(usage_code(card)) == 2


def test_a_usage_part_beside_the_manifest_comes_before_the_packaged_one(tmp_path: Path) -> None:
    (tmp_path / "usage_peft.md.j2").write_text("Ask us about {{ variant.label }}.", encoding="utf-8")
    card = render_card(*demo(), beside=tmp_path)
    assert "Ask us about Clef in small." in card
    assert usage_code(card) == ()


def test_an_unknown_usage_part_is_a_problem_of_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "clef.yaml"
    text = (MANIFESTS / "clef.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("usage_decision_head.md.j2", "usage_decison_head.md.j2"), encoding="utf-8")
    manifest, problems = read_manifest(file)
    assert manifest is None
    assert [problem.field for problem in problems] == ["card.usage"]
    assert problems[0].what == (
        "there is no template 'usage_decison_head.md.j2'; "
        "use usage_decision_head.md.j2, usage_peft.md.j2, or put the file beside the manifest"
    )


# --- evidence -----------------------------------------------------------------------------------------------


def stage(folder: Path, evidence: tuple[VariantEvidence, ...]) -> Path:
    for item in evidence:
        item.extraction.write(folder / item.variant.folder / "extraction.json")
        if item.verification:
            item.verification.write(folder / item.variant.folder / "verification.json")
        judged(item).write(folder / item.variant.folder / "loaders.json")
    return folder


def test_evidence_comes_back_from_the_staged_tree_as_it_was(
    case: tuple[Manifest, tuple[VariantEvidence, ...]], tmp_path: Path
) -> None:
    manifest, evidence = case
    loaded = load_evidence(manifest, stage(tmp_path, evidence))
    assert loaded == evidence
    assert render(manifest, loaded) == render(manifest, evidence)


def test_a_missing_extraction_names_the_command_that_makes_it(tmp_path: Path) -> None:
    manifest, evidence = clef()
    stage(tmp_path, evidence[:1])
    with pytest.raises(CardError, match=r"clef-flash/extraction\.json does not exist\. Next: publish extract"):
        load_evidence(manifest, tmp_path)


def test_a_damaged_extraction_is_refused(tmp_path: Path) -> None:
    manifest, evidence = clef()
    (stage(tmp_path, evidence) / "extraction.json").write_text("{", encoding="utf-8")
    with pytest.raises(FetchError, match=r"extraction\.json"):
        load_evidence(manifest, tmp_path)


OTHER = Checkpoint(kind="hub", name="Cloudflare/clef", revision="a" * 40, files=())
LOCAL = Checkpoint(kind="local", name="clef", revision="a" * 64, files=())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"path": "flash/"}, r"path is flash/\. Expected /\."),
        ({"source": OTHER}, r"source is Cloudflare/clef@aaaa.* Expected Cloudflare/clef@ed3eed33"),
        ({"base": OTHER}, r"base is Cloudflare/clef@aaaa.* Expected Qwen/Qwen3\.8-27B@1d4bf0f2"),
        ({"base": LOCAL}, r"base is a local folder\. Expected Qwen/Qwen3\.8-27B@1d4bf0f2"),
    ],
)
def test_an_extraction_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    manifest, (first, second) = clef()
    other = VariantEvidence(
        variant=first.variant, extraction=first.extraction.model_copy(update=changes), verification=None
    )
    stage(tmp_path, (other, second))
    with pytest.raises(CardError, match=rf"extraction\.json: {complaint}.*Next: publish extract"):
        load_evidence(manifest, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "exact"),
        ("rank", 128),
        ("dtype", "float32"),
        ("layout", "uniform"),
        ("task_type", "SEQ_CLS"),
        ("model_class", "Qwen3_5Model"),
        ("ignore", ("norm",)),
    ],
)
def test_an_extraction_made_with_other_settings_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    manifest, (first, second) = clef()
    settings = first.extraction.settings.model_copy(update={field: value})
    other = first.extraction.model_copy(update={"settings": settings})
    stage(tmp_path, (VariantEvidence(variant=first.variant, extraction=other, verification=None), second))
    with pytest.raises(CardError, match=rf"settings\.{field} is "):
        load_evidence(manifest, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("adapter_sha256", "0" * 64), ("path", "flash/"), ("runner", "logits"), ("dtype", "float32"), ("fp8", None)],
)
def test_a_verification_of_something_else_is_refused(tmp_path: Path, field: str, value: str | None) -> None:
    manifest, (first, second) = clef()
    other = on_fp8(first.extraction).model_copy(update={field: value})
    stage(tmp_path, (VariantEvidence(variant=first.variant, extraction=first.extraction, verification=other), second))
    with pytest.raises(CardError, match=rf"verification\.json: {field} is {value}.*Next: publish verify"):
        load_evidence(manifest, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Others"}, r"sets is \['Others', 'Invented pictures, 11 sets'\]"),
        ({"file": digest("other.jsonl", 1)}, r"sets\.Invented requests 0\.4\.2\.file is other\.jsonl"),
        ({"limits": Limits(max_kl=9.0)}, r"sets\.Invented requests 0\.4\.2\.max_kl is 9\.0\. Expected None"),
    ],
)
def test_a_verification_with_other_sets_or_bounds_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    manifest, (first, second) = clef()
    made = on_fp8(first.extraction)
    other = made.model_copy(update={"sets": (made.sets[0].model_copy(update=changes), made.sets[1])})
    stage(tmp_path, (VariantEvidence(variant=first.variant, extraction=first.extraction, verification=other), second))
    with pytest.raises(CardError, match=rf"verification\.json: {words}"):
        load_evidence(manifest, tmp_path)


def test_a_verification_that_the_manifest_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    manifest, (first, second) = clef()
    stage(
        tmp_path,
        (
            first,
            VariantEvidence(
                variant=second.variant, extraction=second.extraction, verification=verification(second.extraction)
            ),
        ),
    )
    with pytest.raises(CardError, match=r"clef-flash/verification\.json is there, and the manifest asks for no"):
        load_evidence(manifest, tmp_path)


# --- publish card --check -----------------------------------------------------------------------------------


def test_a_card_that_is_up_to_date_has_no_difference(tmp_path: Path) -> None:
    card = render(*clef())
    (tmp_path / "README.md").write_text(card, encoding="utf-8", newline="")
    assert check_card(card, tmp_path / "README.md") == ""


def test_a_stale_card_shows_the_line_that_changed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(render(*clef()).replace("84.73%", "99.99%"), encoding="utf-8", newline="")
    changed = [line for line in check_card(render(*clef()), tmp_path / "README.md").splitlines() if line[:1] in "+-"]
    assert changed[2:] == [
        "-| Weights restored bit for bit | 99.99% | 85.05% |",
        "+| Weights restored bit for bit | 84.73% | 85.05% |",
    ]


def test_a_card_that_is_not_there_is_all_new(tmp_path: Path) -> None:
    card = render(*clef())
    diff = check_card(card, tmp_path / "README.md").splitlines()
    assert [line.removeprefix("+") for line in diff[3:]] == card.splitlines()


# --- display forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count(6373), "6,373"),
        (percent(0.0009), "0.09%"),
        (percent(0.0), "0%"),
        (percent(1.0), "100%"),
        (percent(0.999951), ">99.99%"),
        (percent(0.00004), "<0.01%"),
        (figure(0.0035), "0.00350"),
        (figure(1.0), "1.00"),
        (size(1_323_000_000), "1.32 GB"),
        (size(999_960_000), "1.00 GB"),
        (size(88_800_000), "88.8 MB"),
        (size(999_960), "1.0 MB"),
        (size(4012), "4.0 kB"),
    ],
)
def test_figures_are_shown_in_their_documented_form(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True))
def test_a_share_never_reads_as_nothing_or_everything_unless_it_is(share: float) -> None:
    shown = percent(share)
    assert shown not in {"0%", "0.00%", "100%", "100.00%"}
    assert abs(float(shown.strip("<>%")) - 100 * share) <= 0.0100001


@given(st.integers(min_value=1000, max_value=10**12))
def test_a_size_is_right_to_half_its_last_digit(octets: int) -> None:
    number, unit = size(octets).split()
    scale, step = {"kB": (1e3, 0.1), "MB": (1e6, 0.1), "GB": (1e9, 0.01)}[unit]
    assert abs(float(number) - octets / scale) <= step / 2 + 1e-9
    assert float(number) < 1000 or unit == "GB"


@pytest.mark.parametrize(
    ("layers", "total", "expected"),
    [
        ("40-63", 64, "186 linears, layers 40–63"),
        ("0-31", 32, "186 linears, all 32 layers"),
        ("0-3, 8-11", 32, "186 linears, layers 0–3, 8–11"),
        ("5", 32, "186 linears, layer 5"),
        ("0", 1, "186 linears, layer 0"),
    ],
)
def test_the_extent_of_an_adapter_reads_naturally(layers: str, total: int, expected: str) -> None:
    _, (first, _) = clef()
    assert extent(with_summary(first, layers=layers, layers_total=total).extraction.summary) == expected
    assert extent(with_summary(first, linears=1).extraction.summary).startswith("1 linear,")


def test_tensor_names_are_grouped_by_what_they_share() -> None:
    names = ("mtp.norm.weight", "mtp.fc.weight", "visual.blocks.0.b", "visual.blocks.1.b", "scale", "lm.head")
    assert grouped(names) == ("`lm.head`", "`mtp.*` (2)", "`scale`", "`visual.blocks.*` (2)")
    assert grouped(()) == ()


def test_the_card_starts_without_torch() -> None:
    code = (
        "import sys, publisher.release.card; "
        "sys.exit(sorted({'torch', 'transformers', 'peft'} & set(sys.modules)) or None)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
