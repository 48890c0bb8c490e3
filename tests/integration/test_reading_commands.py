"""`publish report`, `publish explain` and shell completion, as a user types them, on the finished run of the demo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import publisher
from tests import commands
from tests.commands import Answer

MODULE = "model.language_model.layers.7.self_attn.v_proj"


def publish(folder: Path, *arguments: str, **environment: str) -> Answer:
    """One command, run in this folder."""
    return commands.publish(*arguments, folder=folder, **environment)


# --- report -------------------------------------------------------------------------------------------------


def test_the_report_is_one_file_beside_the_staged_tree(own_small_run: Path) -> None:
    done = publish(own_small_run, "report", "--manifest", "demo.yaml")
    assert (done.returncode, done.stdout) == (0, "report: dist/demo.html\n")
    page = (own_small_run / "dist/demo.html").read_text(encoding="utf-8")
    assert page.count('<tr><th scope="row" data-name=') == 31 + 31
    staged = publish(own_small_run, "card", "--manifest", "demo.yaml", "--check")
    assert staged.returncode == 0, staged.stderr


def test_a_folder_gives_the_same_page_as_its_manifest(own_small_run: Path) -> None:
    publish(own_small_run, "report", "--manifest", "demo.yaml")
    done = publish(own_small_run, "report", "--folder", "dist/demo", "-o", "other.html")
    assert done.returncode == 0, done.stderr
    assert (own_small_run / "other.html").read_bytes() == (own_small_run / "dist/demo.html").read_bytes()


def test_evidence_of_another_manifest_is_refused(own_small_run: Path) -> None:
    text = (own_small_run / "demo.yaml").read_text().replace("rank: auto", "rank: 4")
    (own_small_run / "demo.yaml").write_text(text)
    done = publish(own_small_run, "report", "--manifest", "demo.yaml")
    assert done.returncode == 1
    assert "settings.rank is auto. Expected 4." in done.stderr
    assert not (own_small_run / "dist/demo.html").exists()


# --- the card's charts ------------------------------------------------------------------------------------


def test_a_stale_or_missing_chart_makes_the_card_stale_and_is_made_again(own_small_run: Path) -> None:
    (own_small_run / "dist/demo/errors.svg").write_text("<svg/>")
    (own_small_run / "dist/demo/clef-flash/spectrum.svg").unlink()
    check = publish(own_small_run, "card", "--manifest", "demo.yaml", "--check")
    assert check.returncode == 1
    assert "dist/demo/clef-flash/spectrum.svg is stale" in check.stderr
    push = publish(own_small_run, "push", "--manifest", "demo.yaml", "--hub", "local")
    assert push.returncode == 1
    assert "is stale" in push.stderr
    assert publish(own_small_run, "card", "--manifest", "demo.yaml").stdout == "card written: dist/demo/README.md\n"
    assert publish(own_small_run, "card", "--manifest", "demo.yaml", "--check").returncode == 0


def test_a_chart_that_the_evidence_does_not_give_any_more_goes(own_small_run: Path) -> None:
    file = own_small_run / "dist/demo/extraction.json"
    evidence = json.loads(file.read_text())
    for module in evidence["modules"]:
        del module["spectrum"]
    file.write_text(json.dumps(evidence))
    assert publish(own_small_run, "card", "--manifest", "demo.yaml").returncode == 0
    assert sorted(path.name for path in (own_small_run / "dist/demo").glob("*.svg")) == ["errors.svg"]
    assert "](spectrum.svg)" not in (own_small_run / "dist/demo/README.md").read_text()


# --- explain ------------------------------------------------------------------------------------------------


def test_explain_tells_all_of_one_module(small_run: Path) -> None:
    done = publish(small_run, "explain", "layers.7.self_attn.v_proj", "--manifest", "demo.yaml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{MODULE}\nin Clef in small, variant /\n\nverdict          whole: ")
    assert f"base_model.model.{MODULE}.lora_A.weight (16 x 96)" in done.stdout
    assert "\x1b" not in done.stdout


def test_explain_names_the_nearest_of_an_unknown_module(small_run: Path) -> None:
    done = publish(small_run, "explain", "layers.7.self_atn.v_proj", "--folder", "dist/demo")
    assert done.returncode == 2
    assert f"the nearest are:\n  {MODULE}\n" in done.stderr


def test_explain_gives_one_json_document(small_run: Path) -> None:
    done = publish(small_run, "explain", MODULE, "--folder", "dist/demo", "--json")
    found = json.loads(done.stdout)
    assert [(one["variant"], one["figures"]["rank"]) for one in found] == [("/", 16)]


@pytest.mark.parametrize("command", ["report", "explain"])
def test_commands_that_read_start_without_torch(small_run: Path, tmp_path: Path, command: str) -> None:
    arguments = ["report", "-o", str(tmp_path / "page.html")] if command == "report" else ["explain", MODULE]
    script = (
        f"import sys; sys.argv = ['publish', *{arguments!r}, '--folder', 'dist/demo']\n"
        "from publisher.cli.app import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)\n"
    )
    paths = {"PYTHONPATH": str(Path(publisher.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=small_run,
        env=os.environ | paths,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- completion ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(small_run: Path, shell: str) -> None:
    done = publish(small_run, _PUBLISH_COMPLETE=f"{shell}_source")
    assert done.returncode == 0, done.stderr
    assert "_PUBLISH_COMPLETE" in done.stdout


def completions(folder: Path, line: str) -> list[str]:
    """What bash is offered at the end of this line."""
    words = str(len(line.split(" ")) - 1)
    done = publish(folder, _PUBLISH_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=words)
    assert done.returncode == 0, done.stderr
    return [offered.partition(",")[2] for offered in done.stdout.splitlines() if offered]


def test_commands_options_and_stages_are_completed(small_run: Path) -> None:
    assert completions(small_run, "publish re") == ["report"]
    assert completions(small_run, "publish report --fo") == ["--folder"]
    assert completions(small_run, "publish --until va") == ["validate"]


def test_modules_are_completed_from_the_evidence_named_before(small_run: Path) -> None:
    offered = completions(small_run, "publish explain --folder dist/demo 7.self_attn")
    assert offered == [f"model.language_model.layers.7.self_attn.{name}_proj" for name in "koqv"]
    assert completions(small_run, "publish explain --folder nowhere model") == []
