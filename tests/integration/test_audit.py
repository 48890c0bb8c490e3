"""An audit passes on what was staged, and finds and names whatever was done to it afterwards."""

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from publisher.audits import audit
from publisher.cli import app as cli
from publisher.errors import FetchError, ManifestError
from publisher.extraction.comparison import Comparison
from publisher.extraction.summary import summarise
from publisher.manifest.reading import read_manifest
from publisher.numerics.noise import expected_error
from publisher.records.audit import Audit, Check
from publisher.records.checkpoint import FileDigest
from publisher.records.extraction import Extraction, ModuleExtraction
from publisher.records.files import canonical_json, sha256_of
from publisher.records.progress import silent
from publisher.records.verification import Verification
from publisher.release.card import card_files, stale_charts
from publisher.release.evidence import load_evidence
from publisher.verification.metrics import AnswerPair, set_metrics

WEIGHTS, CONFIG, EVIDENCE = "adapter_model.safetensors", "adapter_config.json", "extraction.json"
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def release(pico_release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the release to tamper with; the pairs are where its manifest says, below the current folder."""
    shutil.copytree(pico_release, tmp_path / "release")
    shutil.copytree(pico_release.parents[1] / "pairs", tmp_path / "pairs")
    monkeypatch.chdir(tmp_path)
    return Path("release")


def audited(folder: Path, *, deep: bool = False) -> Audit:
    return audit(str(folder), deep=deep, work=Path("work"), device="cpu", progress=silent)


def failures(found: Audit) -> dict[str, str]:
    """What failed, and why: `card`, or `digests /`."""
    return {f"{check.name} {check.variant}".rstrip(): check.detail for check in found.failed}


def check(found: Audit, name: str, variant: str = "") -> Check:
    return next(check for check in found.checks if (check.name, check.variant) == (name, variant))


# --- the release as it is -----------------------------------------------------------------------------------


def test_a_staged_release_passes_and_what_was_not_checked_is_said(release: Path) -> None:
    found = audited(release)
    assert failures(found) == {}
    assert {c.name for c in found.checks if c.status == "not checked"} == {
        "download",
        "repository",
        "signature",
        "loaders",
        "verification",
        "source",
        "base",
    }


def test_a_deep_audit_checks_checkpoints_too(release: Path) -> None:
    found = audited(release, deep=True)
    assert failures(found) == {}
    deep = {c.name: c for c in found.checks if c.variant == "small/"}
    assert all(
        deep[name].status == "passed"
        for name in ("checkpoints", "comparison", "extraction", "reconstruction", "function")
    )
    assert deep["comparison"].detail == "14 tensors differ, 7 are equal"


@pytest.mark.usefixtures("own_small_run")
def test_a_deep_audit_passes_on_an_adapter_of_the_real_architecture() -> None:
    found = audited(Path("dist/demo"), deep=True)
    assert failures(found) == {}
    assert check(found, "loading", "clef-flash/").detail == (
        "PEFT loads 31 modules whole on Qwen3_5ForConditionalGeneration, at scale 1"
    )
    assert check(found, "comparison", "clef-flash/").detail == "31 tensors differ, 58 are equal"
    assert check(found, "extraction", "clef-flash/").status == "passed"


def test_evidence_and_card_of_before_there_were_spectra_pass_too(release: Path) -> None:
    for folder in (release, release / "small"):
        edit_json(folder / EVIDENCE, lambda e: [module.pop("spectrum") for module in e["modules"]])
        (folder / "spectrum.svg").unlink()
    reseal(release)
    found = audited(release, deep=True)
    assert failures(found) == {}
    assert check(found, "evidence", "/").status == "passed"
    assert check(found, "charts", "/").detail == "byte for byte what extraction.json gives: errors.svg"


# --- tools of a forger --------------------------------------------------------------------------------------


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(canonical_json(value))


def edit_config(folder: Path, **fields: object) -> None:
    edit_json(folder / CONFIG, lambda config: config.update(fields))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def halve(module: str, figure: str) -> Callable[[dict[str, Any]], None]:
    def edit(extraction: dict[str, Any]) -> None:
        entry = next(entry for entry in extraction["modules"] if entry["name"] == module)
        entry[figure] /= 2

    return edit


def reseal(folder: Path) -> None:
    """Digests in extraction.json, the card and its charts, made anew for what is there now."""
    for place in (folder, folder / "small"):
        files = {"adapter": WEIGHTS, "config": CONFIG}
        digests = {field: (sha256_of(place / name), (place / name).stat().st_size) for field, name in files.items()}
        edit_json(place / EVIDENCE, partial(_seal, digests))
    manifest, _ = read_manifest(folder / "manifest.yaml")
    assert manifest is not None
    files = card_files(manifest, load_evidence(manifest, folder), beside=folder)
    for path in stale_charts(manifest, files, folder):
        (folder / path).unlink()
    for path, text in files.items():
        (folder / path).write_text(text)


def _seal(digests: dict[str, tuple[str, int]], extraction: dict[str, Any]) -> None:
    for field, (sha256, size) in digests.items():
        extraction["summary"][field].update(sha256=sha256, size=size)


# --- tamperings ---------------------------------------------------------------------------------------------


def one_byte_of_the_weights(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[-2] ^= 1  # the last bit of the last number
    (folder / WEIGHTS).write_bytes(content)


def weights_cut_short(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def a_figure_in_the_card(folder: Path) -> None:
    replace(folder / "README.md", "| 6, 4 |", "| 6, 3 |")


def a_sentence_in_the_card(folder: Path) -> None:
    replace(folder / "README.md", "No verification was run", "A verification was run")


def base_model_of_the_card(folder: Path) -> None:
    replace(folder / "README.md", "library_name: peft", "base_model: o/other\nlibrary_name: peft")


def a_stale_card(folder: Path) -> None:
    replace(folder / "manifest.yaml", "title: Pico", "title: Pico again")


def swapped_base_revision(folder: Path) -> None:
    edit_config(folder, revision="b" * 40)


def task_type_null(folder: Path) -> None:
    edit_config(folder, task_type=None)


def missing_module(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.pop(f"base_model.model.{Q_PROJ}.lora_{half}.weight") for half in "AB"])


def missing_half(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.pop(f"base_model.model.{Q_PROJ}.lora_B.weight"))


def extra_module(folder: Path) -> None:
    key = "base_model.model.model.layers.0.mlp.side_proj"
    extra = {f"{key}.lora_A.weight": (6, 48), f"{key}.lora_B.weight": (96, 6)}
    edit_tensors(folder, lambda t: t.update({k: torch.ones(s, dtype=torch.bfloat16) for k, s in extra.items()}))


def zeroed_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[f"base_model.model.{Q_PROJ}.lora_B.weight"].zero_())


def not_a_number(folder: Path) -> None:
    edit_tensors(folder, lambda t: t[f"base_model.model.{Q_PROJ}.lora_A.weight"].view(-1)[3:4].fill_(float("nan")))


def cast_to_float32(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({key: tensor.float() for key, tensor in t.items()}))


def weights_of_the_other_variant(folder: Path) -> None:
    shutil.copy(folder / "small" / WEIGHTS, folder / WEIGHTS)


def rank_pattern_without_alpha_pattern(folder: Path) -> None:
    edit_config(folder, alpha_pattern={})


def wrong_alpha_pattern(folder: Path) -> None:
    edit_json(folder / CONFIG, lambda config: config["alpha_pattern"].update(dict.fromkeys(config["alpha_pattern"], 8)))


def rank_as_text(folder: Path) -> None:
    edit_config(folder, r="6")


def target_by_suffix(folder: Path) -> None:
    edit_json(folder / CONFIG, lambda config: config["target_modules"].append("q_proj"))


def config_that_is_no_json(folder: Path) -> None:
    (folder / CONFIG).write_text("{")


def wrong_key_prefix(folder: Path) -> None:
    tensors = {key.removeprefix("base_model.model."): tensor for key, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def adapter_name_in_the_keys(folder: Path) -> None:
    tensors = {key.replace(".weight", ".default.weight"): value for key, value in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edited_summary(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e["summary"]["relative_error"].update(max=0.0001))


def edited_summary_and_a_fresh_card(folder: Path) -> None:
    edited_summary(folder)
    reseal(folder)


def edited_module(folder: Path) -> None:
    edit_json(folder / EVIDENCE, halve(Q_PROJ, "fit_error"))


def edited_singular_value(folder: Path) -> None:
    edit_json(folder / EVIDENCE, halve(Q_PROJ, "sigma_r"))


def a_spectrum_that_rises(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e["modules"][0]["spectrum"].reverse())


def a_spectrum_cut_short(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e["modules"][0]["spectrum"].pop())


def a_kinder_chart(folder: Path) -> None:
    replace(folder / "errors.svg", 'class="m2"', 'class="m0"')


def chart_missing(folder: Path) -> None:
    (folder / "spectrum.svg").unlink()


def not_a_number_as_a_figure(folder: Path) -> None:
    text = (folder / EVIDENCE).read_text()
    (folder / EVIDENCE).write_text(re.sub(r'"fit_error": [\d.e-]+,', '"fit_error": NaN,', text, count=1))


def impossible_module(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e["modules"][0].update(shape=[0, 0], rank=-3))


def no_modules(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e.update(modules=[]))


def evidence_written_by_hand(folder: Path) -> None:
    (folder / EVIDENCE).write_text(json.dumps(json.loads((folder / EVIDENCE).read_text())))


def evidence_of_another_schema(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e.update(schema_version=0))


def evidence_missing(folder: Path) -> None:
    (folder / EVIDENCE).unlink()


def recorded_digest_of_the_base(folder: Path) -> None:
    edit_json(folder / EVIDENCE, lambda e: e["base"]["files"][1].update(sha256="0" * 64))


def ask_for_a_verification(folder: Path) -> None:
    sets = "[{name: Two, file: two.jsonl}]"
    asked = f"verification: {{runner: decision, trust_remote_code: true, sets: {sets}}}"
    model_class = "model_class: LlamaForCausalLM"
    text = (folder / "manifest.yaml").read_text()
    (folder / "manifest.yaml").write_text(text.replace(model_class, f"{model_class}\n    {asked}", 1))


def verification_that_was_removed(folder: Path) -> None:
    ask_for_a_verification(folder)


def verification_nobody_asked_for(folder: Path) -> None:
    verification_with_a_better_figure(folder)
    text = (folder / "manifest.yaml").read_text()
    (folder / "manifest.yaml").write_text(re.sub(r"\n    verification: .*", "", text))


def verification_of_another_adapter(folder: Path) -> None:
    verification = {"schema_version": 1, "path": "/", "adapter_sha256": "0" * 64, "sets": []}
    verification |= {"runner": "decision", "device": "cpu", "dtype": "bfloat16", "packages": {}}
    ask_for_a_verification(folder)
    (folder / "verification.json").write_text(canonical_json(verification))


def verification_with_a_better_figure(folder: Path) -> None:
    logits, file = np.array([0.0, 1.0]), FileDigest(name="two.jsonl", size=1, sha256="0" * 64)
    pairs = [AnswerPair("a", "q", "noul", "", logits, logits), AnswerPair("b", "q", "noul", "", logits, -logits)]
    made = Verification(
        path="/",
        adapter_sha256=sha256_of(folder / "adapter_model.safetensors"),
        runner="decision",
        device="cpu",
        dtype="bfloat16",
        packages={},
        sets=(set_metrics("Two", pairs, file=file).model_copy(update={"answers_changed_share": 0.0}),),
    )
    ask_for_a_verification(folder)
    made.write(folder / "verification.json")


def moved_base_in_the_manifest(folder: Path) -> None:
    old = "base: {path: pairs/base}"
    replace(folder / "manifest.yaml", old, f"base: {{repo: o/base, revision: {'c' * 40}}}")


def another_class_in_the_manifest(folder: Path) -> None:
    replace(folder / "manifest.yaml", "model_class: LlamaForCausalLM", "model_class: MistralForCausalLM")


def a_manifest_with_a_fault(folder: Path) -> None:
    replace(folder / "manifest.yaml", "rank: auto", "rank: -1")


def manifest_missing(folder: Path) -> None:
    (folder / "manifest.yaml").unlink()


def foreign_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def foreign_code(folder: Path) -> None:
    (folder / "modeling_pico.py").write_text("raise SystemExit\n")


def pickle_beside_the_weights(folder: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(b"")


def text_in_a_variant(folder: Path) -> None:
    (folder / "small" / "README.md").write_text("Another story.\n")


def template_in_the_repository(folder: Path) -> None:
    (folder / "lora_card.md.j2").write_text("{{ 1 / 0 }}")


def resealed(tamper: Callable[[Path], None]) -> Callable[[Path], None]:
    """The same by a forger who makes digests and card anew."""

    def both(folder: Path) -> None:
        tamper(folder)
        reseal(folder)

    both.__name__ = f"{tamper.__name__}_resealed"
    return both


# What is done, which checks fail, and the words that one of them, the first, must say.
TAMPERINGS: list[tuple[Callable[[Path], None], list[str], str]] = [
    (one_byte_of_the_weights, ["digests /"], f"{WEIGHTS} has SHA-256"),
    (weights_cut_short, ["keys /", "digests /"], "is not a whole safetensors file"),
    (a_figure_in_the_card, ["card"], "3 instead of 4"),
    (a_sentence_in_the_card, ["card"], "-A verification was run"),
    (base_model_of_the_card, ["card"], "-base_model: o/other"),
    (a_stale_card, ["card"], "+# Pico again"),
    (swapped_base_revision, ["recorded config /", "digests /"], "revision is 'bbbb"),
    (resealed(swapped_base_revision), ["recorded config /"], "revision is 'bbbb"),
    (task_type_null, ["recorded config /", "digests /"], "task_type is nothing"),
    (missing_module, ["targets /", "recorded tensors /", "loading /", "digests /"], f"{Q_PROJ} is in target_modules"),
    (missing_half, ["keys /", "targets /", "recorded tensors /", "loading /", "digests /"], f"{Q_PROJ} has lora_A"),
    (extra_module, ["targets /", "recorded tensors /", "loading /", "digests /"], "side_proj is in the file"),
    (resealed(extra_module), ["recorded tensors /", "targets /", "loading /"], "side_proj"),
    (zeroed_tensor, ["tensors /", "recorded tensors /", "singular values /", "digests /"], f"{Q_PROJ}.lora_B is all"),
    (not_a_number, ["tensors /", "recorded tensors /", "loading /", "digests /"], f"{Q_PROJ}.lora_A holds NaN"),
    (cast_to_float32, ["recorded tensors /", "digests /"], "is torch.float32 instead of bfloat16"),
    (resealed(cast_to_float32), ["recorded tensors /"], "is torch.float32 instead of bfloat16"),
    (weights_of_the_other_variant, ["singular values /", "digests /"], "the factors have"),
    (
        rank_pattern_without_alpha_pattern,
        ["scale /", "recorded config /", "loading /", "digests /"],
        "rank_pattern without alpha_pattern: PEFT scales by 1 in 10 modules, 1.5 in 4 modules",
    ),
    (wrong_alpha_pattern, ["loading /", "recorded config /", "digests /"], "has scaling 2.0 instead of 1"),
    (rank_as_text, ["config /", "recorded config /", "loading /", "digests /"], "r is '6'; expected a whole number"),
    (target_by_suffix, ["recorded config /", "digests /"], "has ['q_proj'] that it should not"),
    (config_that_is_no_json, ["config /", "digests /"], "is not readable JSON"),
    (
        wrong_key_prefix,
        ["keys /", "recorded tensors /", "loading /", "digests /"],
        "does not begin with base_model.model.",
    ),
    (
        adapter_name_in_the_keys,
        ["keys /", "recorded tensors /", "loading /", "digests /"],
        "is no key of a LoRA's tensor",
    ),
    (edited_summary, ["figures /", "card"], "summary.relative_error.max is 0.0001; it comes out as"),
    (edited_summary_and_a_fresh_card, ["figures /"], "summary.relative_error.max is 0.0001; it comes out as"),
    (edited_module, ["figures /"], f"{Q_PROJ}: ratio is"),
    (edited_singular_value, ["singular values /", "figures /", "charts /"], f"{Q_PROJ}: sigma_r is"),
    (a_spectrum_that_rises, ["figures /", "charts /"], "it rises"),
    (a_spectrum_cut_short, ["figures /", "charts /"], "it does not go from sigma_1 to sigma_r"),
    (a_kinder_chart, ["charts /"], "errors.svg is not what extraction.json gives"),
    (chart_missing, ["charts /"], "spectrum.svg is missing"),
    (not_a_number_as_a_figure, ["evidence /"], "NaN is no number in JSON"),
    (
        impossible_module,
        ["evidence /"],
        "rank: Input should be greater than or equal to 0",
    ),
    (no_modules, ["figures /", "recorded tensors /", "loading /", "charts /", "card"], "lists no module"),
    (evidence_written_by_hand, ["evidence /"], "it was edited"),
    (evidence_of_another_schema, ["evidence /"], "schema_version: Input should be 1"),
    (evidence_missing, ["files", "evidence /"], f"{EVIDENCE} is missing"),
    (recorded_digest_of_the_base, ["base /"], "the revision of base in extraction.json is not the digest"),
    (verification_that_was_removed, ["verification /"], "there is no verification.json, and the manifest asks for one"),
    (verification_nobody_asked_for, ["verification /"], "the manifest asks for no verification"),
    (verification_of_another_adapter, ["verification /"], "adapter_sha256 is 0000"),
    (
        verification_with_a_better_figure,
        ["verification /", "card"],
        "Two: answers_changed_share is 0.0; it comes out as 0.5",
    ),
    (moved_base_in_the_manifest, ["recipe /", "recorded config /", "card"], "base is a local folder"),
    (another_class_in_the_manifest, ["recipe /", "loading /", "card"], "model_class is Llama"),
    (a_manifest_with_a_fault, ["manifest"], "variants[0].adapter.rank: -1 is not a rank"),
    (manifest_missing, ["manifest", "files"], "there is no manifest.yaml"),
    (foreign_file, ["files"], "model.safetensors is no part of the release"),
    (foreign_code, ["files"], "modeling_pico.py is no part of the release"),
    (pickle_beside_the_weights, ["files"], "adapter_model.bin is no part of the release"),
    (text_in_a_variant, ["files"], "small/README.md is no part of the release"),
    (template_in_the_repository, ["files"], "lora_card.md.j2 is no part of the release"),
]


@pytest.mark.parametrize(("tamper", "expected", "words"), TAMPERINGS, ids=[row[0].__name__ for row in TAMPERINGS])
def test_what_was_tampered_with_is_found_and_named(
    release: Path, tamper: Callable[[Path], None], expected: list[str], words: str
) -> None:
    tamper(release)
    found = failures(audited(release))
    assert sorted(found) == sorted(expected), found
    assert words in found[expected[0]]


def test_a_tampering_in_a_subfolder_is_told_with_its_variant(release: Path) -> None:
    task_type_null(release / "small")
    assert sorted(failures(audited(release))) == ["digests small/", "recorded config small/"]


def test_what_rests_on_an_unreadable_file_is_not_checked_and_the_rest_is(release: Path) -> None:
    weights_cut_short(release)
    found = audited(release)
    assert check(found, "tensors", "/") == Check(
        name="tensors", variant="/", status="not checked", detail=f"there is no readable {WEIGHTS}"
    )
    assert check(found, "figures", "/").status == "passed"


def test_what_a_repository_usually_has_besides_is_told_and_does_no_harm(release: Path) -> None:
    for name in (".gitattributes", "LICENSE", "docs/plot.png"):
        (release / name).parent.mkdir(exist_ok=True)
        (release / name).write_bytes(b"")
    found = audited(release)
    assert failures(found) == {}
    assert check(found, "files").detail == (
        "12 files of the release; not part of it: .gitattributes, LICENSE, docs/plot.png"
    )


def test_a_card_by_a_template_that_is_not_here_is_not_checked(release: Path) -> None:
    replace(release / "manifest.yaml", "template: lora_card.md.j2", "template: our_card.md.j2")
    found = audited(release)
    assert failures(found) == {}
    assert check(found, "card").detail == "the template our_card.md.j2 does not come with this tool"


# --- what only the checkpoints tell -------------------------------------------------------------------------


def claim(figure: str, folder: Path) -> None:
    """Half of one module's figure, and everything that follows from it: summary, digests and card."""
    edit_json(folder / EVIDENCE, halve(Q_PROJ, figure))
    claimed = Extraction.read(folder / EVIDENCE)
    modules = tuple(consistent(module) for module in claimed.modules)
    summary = claimed.summary
    seen = Comparison((), summary.tensors_equal, (), left_out=(), layers=(0, 1), layers_total=2)  # as before
    summary = summarise(modules, seen, adapter=summary.adapter, config=summary.config)
    claimed.model_copy(update={"modules": modules, "summary": summary}).write(folder / EVIDENCE)
    reseal(folder)


def consistent(module: ModuleExtraction) -> ModuleExtraction:
    expected = expected_error(module.rounding_floor, shape=module.shape, rank=module.rank)
    derived = {"expected_error": expected, "ratio": module.fit_error / expected if expected else None}
    return ModuleExtraction(**{**module.model_dump(), **derived})


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        ("relative_error", ["extraction /", "reconstruction /"]),
        ("exact_share", ["extraction /", "reconstruction /"]),
        ("rounding_floor", ["extraction /"]),
        ("update_rms", ["extraction /"]),
    ],
)
def test_a_consistent_forgery_of_a_figure_takes_a_deep_audit(release: Path, figure: str, expected: list[str]) -> None:
    claim(figure, release)
    assert failures(audited(release)) == {}
    found = failures(audited(release, deep=True))
    assert sorted(found) == expected
    assert f"{Q_PROJ}: {figure} is" in found["extraction /"]


def test_control_characters_of_a_release_do_not_reach_the_terminal(release: Path) -> None:
    replace(release / "README.md", "# Pico", "# Pico \x1b[2J")
    detail = failures(audited(release))["card"]
    assert "-# Pico \\x1b[2J" in detail
    assert "\x1b" not in detail


def test_an_invented_number_of_equal_tensors_takes_a_deep_audit(release: Path) -> None:
    edit_json(release / EVIDENCE, lambda e: e["summary"].update(tensors_equal=9))
    reseal(release)
    assert failures(audited(release)) == {}
    assert failures(audited(release, deep=True)) == {
        "comparison /": "summary.tensors_equal is 9; it comes out as 7",
    }


@pytest.mark.parametrize("side", ["base", "one"])
def test_a_swapped_checkpoint_is_found_by_its_digest_and_by_its_reconstruction(release: Path, side: str) -> None:
    file = Path("pairs", side, "model.safetensors")
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.weight"] += 0.01
    save_file(tensors, file, metadata={"format": "pt"})
    found = failures(audited(release, deep=True))
    assert {"checkpoints /", "reconstruction /"} <= found.keys()
    assert "model.safetensors is" in found["checkpoints /"]
    assert f"{Q_PROJ}: error" in found["reconstruction /"]


def test_a_base_of_another_size_is_found_and_the_reconstruction_is_not_tried(release: Path) -> None:
    file = Path("pairs/base/model.safetensors")
    tensors = load_file(file)
    tensors[f"{Q_PROJ}.weight"] = tensors[f"{Q_PROJ}.weight"][:-1].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    found = audited(release, deep=True)
    assert "do not match" in check(found, "comparison", "/").detail
    assert check(found, "reconstruction", "/").detail == f"base has no {Q_PROJ} of this shape"


def test_checkpoints_that_are_not_here_are_said_not_to_be_checked(release: Path) -> None:
    shutil.rmtree("pairs")
    found = audited(release, deep=True)
    assert failures(found) == {}
    assert check(found, "checkpoints", "/").detail == "pairs/base is a local folder, which is not here"
    assert check(found, "loading", "/").detail == "the base is a local folder, pairs/base, which is not here"
    assert check(found, "reconstruction", "/").status == "not checked"


# --- adapters by another tool -------------------------------------------------------------------------------


@pytest.fixture
def foreign(pico_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What PEFT itself saves, with its own card."""
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(pico_pairs / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT uses what transformers will remove
        model = peft.get_peft_model(LlamaForCausalLM.from_pretrained("base"), config)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained("foreign")
    return Path("foreign")


def test_an_adapter_that_peft_saved_is_checked_as_far_as_its_files_go(foreign: Path) -> None:
    found = audited(foreign)
    assert failures(found) == {}
    told = {c.name: c for c in found.checks}
    assert told["scale"].detail == "the ranks are the tensors'; scale 2 in 4 modules"
    assert told["loading"].detail == "PEFT loads 4 modules whole on LlamaForCausalLM"
    assert told["config"].detail == "LoRA, CAUSAL_LM, base base, no base revision pinned"
    assert told["card"].detail == "base model 'base', library peft"
    unchecked = {name: c.detail for name, c in told.items() if c.status == "not checked"}
    assert unchecked["digests"] == unchecked["figures"] == "there is no readable extraction.json"
    assert unchecked["files"] == "no manifest.yaml says which files belong to the release"


def zero_b(folder: Path) -> None:
    edit_tensors(folder, lambda t: [tensor.zero_() for key, tensor in t.items() if ".lora_B." in key])


def lose_a_module(folder: Path) -> None:
    edit_tensors(folder, lambda t: [t.pop(f"base_model.model.{Q_PROJ}.lora_{half}.weight") for half in "AB"])


def lose_a_target(folder: Path) -> None:
    edit_config(folder, target_modules=["q_proj"])


def add_a_target(folder: Path) -> None:
    edit_config(folder, target_modules=["q_proj", "v_proj", "k_proj"])


def wrong_rank(folder: Path) -> None:
    edit_config(folder, r=8)


def nameless_base(folder: Path) -> None:
    edit_config(folder, base_model_name_or_path="")


def impossible_pattern(folder: Path) -> None:
    edit_config(folder, target_modules="(")


def other_base_in_the_card(folder: Path) -> None:
    replace(folder / "README.md", "base_model: base", "base_model: o/other")


def header_that_is_no_yaml(folder: Path) -> None:
    (folder / "README.md").write_text("---\nbase_model: [\n---\n")


FOREIGN: list[tuple[Callable[[Path], None], list[str], str]] = [
    (zero_b, ["tensors /", "loading /"], "lora_B is all zero: the module changes nothing"),
    (lose_a_module, ["loading /"], "1 module adapted for which the file has nothing"),
    (wrong_key_prefix, ["keys /", "loading /"], "does not begin with base_model.model."),
    (lose_a_target, ["targets /", "loading /"], "target_modules does not select it"),
    (add_a_target, ["targets /", "loading /"], "k_proj is in target_modules and no module of the file is meant"),
    (wrong_rank, ["scale /", "loading /"], "the config gives rank 8, the tensors have 4"),
    (nameless_base, ["config /"], "base_model_name_or_path is ''"),
    (impossible_pattern, ["targets /", "loading /"], "'(' is no regular expression"),
    (other_base_in_the_card, ["card"], "base_model is 'o/other'; the adapters' is base"),
    (header_that_is_no_yaml, ["card"], "README.md has no header that can be read"),
]


@pytest.mark.parametrize(("tamper", "expected", "words"), FOREIGN, ids=[row[0].__name__ for row in FOREIGN])
def test_faults_of_a_foreign_adapter_are_found_and_named(
    foreign: Path, tamper: Callable[[Path], None], expected: list[str], words: str
) -> None:
    tamper(foreign)
    found = failures(audited(foreign))
    assert sorted(found) == sorted(expected), found
    assert words in found[expected[0]]


def test_an_adapter_without_a_task_type_is_sound(foreign: Path) -> None:
    edit_config(foreign, task_type=None)
    found = audited(foreign)
    assert failures(found) == {}
    assert check(found, "config", "/").detail.startswith("LoRA, no task type, base ")


def test_a_pickled_adapter_is_never_opened(foreign: Path) -> None:
    (foreign / WEIGHTS).unlink()
    (foreign / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    found = audited(foreign)
    assert check(found, "files").detail.endswith("pickled files, which are not opened: adapter_model.bin")
    assert failures(found) == {"keys /": f"{WEIGHTS} is missing"}
    assert check(found, "loading", "/").status == "not checked"


# --- the command --------------------------------------------------------------------------------------------


def publish(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["publish", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command_prints_a_table_and_ends_with_0(
    release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish("audit", str(release), "--deep", "--device", "cpu", monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "  small/   reconstruction    passed       14 modules; the largest difference from a claim" in printed
    assert printed.endswith("release: 41 passed, 0 failed, 11 not checked\n")


def test_the_command_ends_with_1_and_one_line_that_names_what_failed(
    release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_figure_in_the_card(release)
    one_byte_of_the_weights(release)
    assert publish("audit", str(release), monkeypatch=monkeypatch) == 1
    printed = capsys.readouterr()
    assert "error: 2 of 42 checks failed: card, digests /.\n" in printed.err
    assert "-| Rank | 6, 3 | 6, 4 |\n+| Rank | 6, 4 | 6, 4 |" in printed.out


def test_the_command_gives_one_json_document(
    release: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign_file(release)
    assert publish("audit", str(release), "--json", monkeypatch=monkeypatch) == 1
    found = Audit.model_validate_json(capsys.readouterr().out)
    assert [c.name for c in found.failed] == ["files"]


def test_a_target_that_is_neither_folder_nor_repository_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="neither a folder here nor a repository id"):
        audited(tmp_path / "absent")


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Nothing.\n")
    with pytest.raises(FetchError, match="holds no adapter"):
        audited(tmp_path)
