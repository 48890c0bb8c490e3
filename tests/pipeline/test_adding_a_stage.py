"""A stage is added by one module and one line: to a copy of the package, which then runs as any user runs it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from publisher.cli.demo.checkpoints import Pair, make_pairs
from tests.manifests import ADAPTER, one_variant

ROOT = Path(__file__).parents[2]
MODULE = '''"""Weigh: how many bytes the adapter has."""

from publisher.records.filenames import ADAPTER
from publisher.records.files import write_text


def weigh(site):
    """Write the size of the adapter into the work folder."""
    site.progress(f"weighing {site.variant.label}")
    write_text(site.kept("weight.json"), f"{(site.staged / ADAPTER).stat().st_size}\\n")
'''
LINE = '    Stage("weigh", needs=("extract",), writes=("weight.json",), published=False, rests_on=keys.validation),\n'
BEFORE = '    Stage(\n        "loaders",\n'


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, its templates and manifests, and one stage more."""
    folder = tmp_path_factory.mktemp("tool")
    for name in ("publisher", "templates", "manifests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "publisher/pipeline/stages/weigh.py").write_text(MODULE)
    table = folder / "publisher/pipeline/table.py"
    text = table.read_text()
    assert text.count(BEFORE) == 1
    table.write_text(text.replace(BEFORE, LINE + BEFORE))
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small pair and its manifest, m.yaml."""
    folder = tmp_path_factory.mktemp("work")
    make_pairs([Pair("clef", layers=4, first_adapted=0, hidden=64, intermediate=128, heads=4)], folder / "demo")
    text = one_variant(
        "o/one",
        label="One",
        source="demo/clef",
        base="demo/clef-base",
        card={"title": "One", "summary": "An adapter."},
        model_class="Qwen3_5ForConditionalGeneration",
        adapter=dict(ADAPTER) | {"task_type": "FEATURE_EXTRACTION"},
    )
    (folder / "m.yaml").write_text(text)
    return folder


def publish(tool: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "publisher", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(tool)},
        capture_output=True,
        text=True,
        check=False,
    )


def run(tool: Path, work: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Return the outcome of a dry run, and what it told."""
    done = publish(tool, "--manifest", "m.yaml", "--dry-run", "--device", "cpu", "--json", *arguments, cwd=work)
    assert done.returncode == 0, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome, done.stderr


def test_the_command_line_knows_it(tool: Path, work: Path) -> None:
    wrong = publish(tool, "--manifest", "m.yaml", "--until", "weight", cwd=work)
    assert wrong.returncode == 2
    assert "'validate', 'weigh', 'loaders'" in wrong.stderr
    assert "fetch|extract|validate|weigh|loaders" in publish(tool, "--help", cwd=work).stdout


@pytest.mark.long
def test_it_runs_in_its_place_is_reused_and_runs_again_when_its_file_or_its_inputs_changed(
    tool: Path, work: Path
) -> None:
    outcome, told = run(tool, work)
    assert outcome["stages"][:5] == ["fetch", "extract", "validate", "weigh", "loaders"]
    assert outcome["variants"][0]["reused"] == []
    assert outcome["plan"] is not None
    assert told.index("validating One") < told.index("weighing One")
    size = (work / "dist/m/adapter_model.safetensors").stat().st_size
    weight = work / "dist/m.work/root/weight.json"
    assert weight.read_text() == f"{size}\n"

    outcome, told = run(tool, work, "--until", "loaders")
    assert outcome["variants"][0]["reused"] == ["extract", "validate", "weigh", "loaders"]
    assert "weighing" not in told

    weight.write_text("0\n")
    outcome, told = run(tool, work, "--until", "loaders")
    assert outcome["variants"][0]["reused"] == ["extract", "validate", "loaders"]
    assert "weigh runs again: weight.json changed since" in told
    assert weight.read_text() == f"{size}\n"

    outcome, told = run(tool, work, "--from", "weigh", "--until", "weigh")
    assert outcome["stages"] == ["weigh"]
    assert "weighing One" in told
