"""Each example is run as its first lines say, on the small pair, and does what they say."""

import contextlib
import io
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import publish

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RELEASE = ROOT / "tests/releases/0.2.0-svd/release"
TESTED = ("extract_without_a_manifest", "dry_run", "audit_a_release", "errors_of_the_modules", "small_pair")


def ran(name: str, *arguments: str, code: int = 0) -> str:
    """What an example prints on stdout: a program of its own, in the process of the test, which has torch already."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [f"{name}.py", *arguments])
        assert _exit_code(EXAMPLES / f"{name}.py") == code
    return printed.getvalue()


def _exit_code(program: Path) -> int:
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        return 1 if isinstance(end.code, str) else end.code or 0
    return 0


def test_every_example_is_tested_here_and_shows_how_it_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(TESTED)
    for name in TESTED:
        assert f"    python examples/{name}.py " in (EXAMPLES / f"{name}.py").read_text(), name


def test_extraction_without_a_manifest_ends_with_an_adapter_that_peft_reads(models: Path) -> None:
    said = ran("extract_without_a_manifest", str(models / "tuned"), str(models / "base"), "adapter")
    assert said.startswith("12 linears in layers 0-3, rank 8\n")
    assert "loads with PEFT" in said
    assert said.endswith("saved in adapter\n")
    assert json.loads(Path("adapter/adapter_config.json").read_text())["r"] == 8
    assert "taken out" not in ran("extract_without_a_manifest", "models/base", "models/base", "other", code=1)
    assert not Path("other").exists()


def test_a_dry_run_lists_the_files_of_the_commit_and_publishes_nothing(models: Path) -> None:
    done = publish("new", "--source", f"{models}/tuned", "--base", f"{models}/base", "-o", "pair.yaml")
    assert done.returncode == 0, done.stderr
    said = ran("dry_run", "pair.yaml")
    assert said.startswith("your-name/tuned-lora would get:\n")
    listed = set(re.findall(r"^  (?:added|not compared) +(\S+)$", said, re.MULTILINE))
    staged = {path.relative_to("dist/pair").as_posix() for path in Path("dist/pair").rglob("*") if path.is_file()}
    assert listed == staged
    assert {"README.md", "adapter_model.safetensors", "extraction.json"} <= listed
    assert "PEFT loads all 12 modules" in said


def test_an_audit_lists_what_failed(tmp_path: Path) -> None:
    assert re.search(r"^0 of \d+ checks failed$", ran("audit_a_release", str(RELEASE)), re.MULTILINE)
    release = shutil.copytree(RELEASE, tmp_path / "release")
    evidence = (release / "extraction.json").read_text()
    changed = evidence.replace('"relative_error": 0.', '"relative_error": 0.9', 1)
    assert changed != evidence
    (release / "extraction.json").write_text(changed)
    said = ran("audit_a_release", str(release), code=1)
    assert "FAILED evidence /" in said
    assert "FAILED figures /" in said


def test_the_drawing_has_a_line_for_each_module_the_largest_error_first() -> None:
    modules = json.loads((RELEASE / "extraction.json").read_text())["modules"]
    lines = ran("errors_of_the_modules", str(RELEASE / "extraction.json")).splitlines()
    in_order = sorted(modules, key=lambda module: -module["relative_error"])
    assert [line.split()[-1] for line in lines] == [module["name"] for module in in_order]
    assert lines[0].startswith("#" * 10)
    assert all(line[:51].count("|") == 1 for line in lines)


def test_the_small_pair_is_two_checkpoints(tmp_path: Path) -> None:
    ran("small_pair", str(tmp_path))
    assert {path.parent.name for path in tmp_path.glob("*/model.safetensors")} == {"base", "tuned"}
