"""`publish compat`, and the verdicts that a run writes to loaders.json."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from publisher.audits import audit
from publisher.cli.app import cli
from publisher.errors import CardError, FetchError, HubError, ManifestError, PushError
from publisher.manifest.reading import load_manifest
from publisher.pipeline.run import Run, run
from publisher.records.audit import Check
from publisher.records.extraction import Extraction
from publisher.records.loaders import Loaders, LoaderVerdict
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from publisher.records.provenance import code_digest
from publisher.release.evidence import load_evidence, read_release
from tests.manifests import one_variant

Staging = Callable[[Path, dict[str, str], str], Path]
MANIFEST, STAGED, WORK = Path("pico.yaml"), Path("dist/pico"), Path("dist/pico.work")
EVERY = ["PEFT", "transformers", "vLLM", "SGLang", "llama.cpp", "MLX"]


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pico_pairs: Path, pico_release: Path) -> None:
    """A copy of the pico release, extracted but not validated, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pico_release.parent, "dist")
    shutil.copy(pico_release.parents[1] / MANIFEST, MANIFEST)
    Path("pairs").symlink_to(pico_pairs)


def rerun(**options: Any) -> Outcome:
    return run(Run(MANIFEST, Path("dist"), device="cpu", **{"last": "card"} | options), silent)


def compat(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["compat", *arguments])


def content() -> dict[str, bytes]:
    return {path.relative_to(STAGED).as_posix(): path.read_bytes() for path in STAGED.rglob("*") if path.is_file()}


def evidence(folder: str = "") -> Extraction:
    return Extraction.read(STAGED / folder / "extraction.json")


def verdicts(folder: str = "") -> tuple[LoaderVerdict, ...]:
    return Loaders.read(STAGED / folder / "loaders.json").verdicts


# --- in a run -------------------------------------------------------------------------------------------------


def test_what_passed_validation_has_its_loaders_in_loaders_json_and_on_the_card() -> None:
    before = (STAGED / "extraction.json").read_bytes()
    assert not (STAGED / "loaders.json").exists()
    outcome = rerun()
    assert [one.loader for one in verdicts()] == EVERY
    assert outcome.variants[0].loaders == verdicts()
    assert (STAGED / "extraction.json").read_bytes() == before, "no stage adds to what another has written"
    card = (STAGED / "README.md").read_text()
    assert "\n### Loads with\n" in card
    assert "| llama.cpp | commits 0b03adaa, 0650ea8c, read | wrongly, with `convert_lora_to_gguf.py " in card
    assert "\n- Pico two, vLLM: \\--lora-modules takes no subfolder: download small/ and name" in card


def test_no_path_of_this_machine_is_in_a_verdict() -> None:
    rerun()
    text = json.dumps([one.model_dump() for folder in ("", "small") for one in verdicts(folder)])
    assert str(Path.cwd()) not in text
    assert "pairs/" not in text


def test_a_second_run_reuses_them_with_the_same_bytes() -> None:
    rerun()
    before = content()
    again = rerun()
    assert all(variant.reused == ("extract", "validate", "loaders") for variant in again.variants)
    assert content() == before


def test_lost_verdicts_are_given_again_without_extracting_or_validating_again() -> None:
    rerun()
    before = content()
    for marker in WORK.rglob("loaders.json"):
        marker.unlink()
    again = rerun()
    assert all(variant.reused == ("extract", "validate") for variant in again.variants)
    assert content() == before


def test_verdicts_of_other_rules_take_the_place_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rerun()
    monkeypatch.setattr("publisher.loaders.on_mlx.READ", "mlx-lm 9.9")
    code = {"publisher.pipeline.stages.loaders": "other rules"}
    monkeypatch.setattr("publisher.pipeline.markers.code_digest", lambda name: code.get(name) or code_digest(name))
    again = rerun()
    assert again.variants[0].reused == ("extract", "validate")
    assert verdicts()[-1].version == "mlx-lm 9.9"
    assert rerun().variants[0].reused == ("extract", "validate", "loaders"), "and the new bytes are the ones that hold"


def test_an_extraction_made_again_keeps_its_validation_and_gets_the_same_verdicts() -> None:
    rerun()
    before = content()
    (STAGED / "adapter_config.json").unlink()
    again = rerun()
    assert [variant.reused for variant in again.variants] == [
        ("validate", "loaders"),
        ("extract", "validate", "loaders"),
    ]
    assert content() == before


def test_an_audit_finds_nothing_against_a_release_with_verdicts(tmp_path: Path) -> None:
    rerun()
    found = audit(str(STAGED), deep=False, work=tmp_path, device="cpu", progress=silent)
    assert not found.failed


def test_an_edited_verdict_is_no_result_that_holds() -> None:
    rerun()
    file = STAGED / "loaders.json"
    file.write_text(file.read_text().replace('"loads": "wrongly"', '"loads": "yes"'))
    rerun(first="card")
    with pytest.raises(PushError, match=r"loaders\.json changed since .*loaders\.json was written"):
        rerun(first="push", last="push", rehearse=True)
    rerun()
    assert "wrongly" in {one.loads for one in verdicts()}


def test_verdicts_on_another_adapter_are_on_no_card() -> None:
    rerun()
    file = STAGED / "loaders.json"
    Loaders.read(file).model_copy(update={"adapter_sha256": "0" * 64}).write(file)
    with pytest.raises(CardError, match=r"loaders\.json: adapter_sha256 is 0000.*Next: publish validate --manifest"):
        rerun(first="card")
    found = {check.name: check for check in audited() if check.variant == "/"}
    assert found["loaders"].status == "failed"
    assert found["loaders"].detail == "loaders.json is of another adapter_model.safetensors"


def test_an_audit_tells_an_edited_file_of_verdicts_from_one_as_it_is_written() -> None:
    rerun()
    assert {check.status for check in audited() if check.name == "loaders"} == {"passed"}
    file = STAGED / "small/loaders.json"
    file.write_text(file.read_text().replace("  ", " "))
    found = {check.variant: check for check in audited() if check.name == "loaders"}
    assert (found["/"].status, found["small/"].status) == ("passed", "failed")
    assert "was edited" in found["small/"].detail


def audited() -> tuple[Check, ...]:
    return audit(str(STAGED), deep=False, work=Path("work"), device="cpu", progress=silent).checks


def test_verdicts_that_an_earlier_version_put_in_extraction_json_are_read_there() -> None:
    rerun()
    card, given = (STAGED / "README.md").read_bytes(), verdicts()
    for folder in ("", "small"):
        evidence(folder).model_copy(update={"loaders": verdicts(folder)}).write(STAGED / folder / "extraction.json")
        (STAGED / folder / "loaders.json").unlink()
    assert load_evidence(load_manifest(MANIFEST), STAGED)[0].loaders == given
    assert read_release(None, STAGED, staged=None).adapters[0].loaders == given
    rerun(first="card")
    assert (STAGED / "README.md").read_bytes() == card
    found = audited()
    assert [check for check in found if check.status == "failed"] == []
    assert "the verdicts stand in extraction.json" in next(c.detail for c in found if c.name == "loaders")


def test_evidence_without_verdicts_is_read_written_and_rendered_as_it_was() -> None:
    file = STAGED / "extraction.json"
    assert b"loaders" not in file.read_bytes()
    assert evidence().to_json().encode() == file.read_bytes()
    rerun(first="card")
    assert "Loads with" not in (STAGED / "README.md").read_text()


# --- the command ----------------------------------------------------------------------------------------------


def test_the_command_shows_loaders_findings_and_what_helps_and_fails_where_one_would_be_wrong() -> None:
    done = compat("--manifest", "pico.yaml", "--variant", "small")
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1] == "error: Pico two loads wrongly with llama.cpp."
    assert "Pico one" not in done.stdout
    assert "llama.cpp: 4 modules at 1.5 times the scale: llama.cpp divides one alpha by each tensor's" in done.stdout
    assert "\n  set adapter.layout: uniform in the manifest, which pads every module to one rank\n" in done.stdout
    assert "vLLM: --lora-modules takes no subfolder" in done.stdout


def test_a_uniform_layout_is_right_everywhere(tmp_path: Path) -> None:
    card = {"title": "Pico", "summary": "One."}
    adapter = {"method": "svd", "rank": "auto", "dtype": "bfloat16", "layout": "uniform", "task_type": "CAUSAL_LM"}
    text = one_variant("o/pico", label="Pico", source="pairs/one", base="pairs/base", card=card, adapter=adapter)
    Path("even.yaml").write_text(text)
    run(Run(Path("even.yaml"), Path("dist"), device="cpu", last="validate"), silent)
    done = compat("-m", "even.yaml", "--json", "--require", "vLLM", "--require", "llama.cpp")
    assert done.exit_code == 0
    found = {one["loader"]: one for one in json.loads(done.stdout)["Pico"]}
    assert {name: one["loads"] for name, one in found.items()} == dict.fromkeys(EVERY, "yes") | {"MLX": "no"}
    assert found["vLLM"]["flags"] == ["--enable-lora"]
    assert compat(str(tmp_path / "dist/even"), "--base", "pairs/base").exit_code == 0
    failed = compat("-m", "even.yaml", "--require", "MLX")
    assert (failed.exit_code, failed.stderr.splitlines()[-1]) == (1, "error: Pico does not load with MLX.")


def test_a_folder_of_any_adapter_is_judged_on_the_base_that_it_names() -> None:
    config = STAGED / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "pairs/base"}))
    done = compat("dist/pico", "--json")
    assert [one["loader"] for one in json.loads(done.stdout)["dist/pico"]] == EVERY


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "give an adapter's folder or --manifest M, one of the two"),
        (("dist/pico", "-m", "pico.yaml"), "give an adapter's folder or --manifest M, one of the two"),
        (("-m", "pico.yaml", "--variant", "large"), "the manifest has no variant at large/"),
        (("-m", "pico.yaml", "--require", "Ollama"), "--require Ollama: no such loader"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(arguments: tuple[str, ...], complaint: str) -> None:
    done = compat(*arguments)
    assert isinstance(done.exception, ManifestError)
    assert str(done.exception).startswith(complaint)


def test_what_is_not_there_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = compat("-m", "pico.yaml", "--dist", "elsewhere").exception
    assert isinstance(missing, FetchError)
    assert str(missing) == ("elsewhere/pico holds no adapter. Next: publish extract --manifest pico.yaml.")
    config = STAGED / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    assert "names no base. Next: name the base's folder with --base" in str(compat("dist/pico").exception)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "no/where"}))
    assert isinstance(compat("dist/pico").exception, HubError)


def test_a_file_without_factors_is_no_adapter() -> None:
    shutil.copy("pairs/base/model.safetensors", STAGED / "adapter_model.safetensors")
    found = compat("dist/pico", "--base", "pairs/base").exception
    assert isinstance(found, FetchError)
    assert "holds no lora_A and no lora_B. Expected a LoRA adapter of PEFT" in str(found)
