"""Whatever goes wrong, a person reads one error with the next step, a program one JSON document; never a traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from publisher.border.causes import explained
from publisher.cli import app as cli
from publisher.cli.help_page import GROUPS
from publisher.errors import FaultError, LibraryError, NoRoomError, SystemTroubleError


class Told:
    """What a command left: its exit code, stdout and stderr."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def errors(self) -> list[str]:
        """The lines that say what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith(("error:", "Error:"))]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """`told("check", "m.yaml")`: what the command line says, in this process."""

    def tell(*arguments: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["publish", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Told(int(ended.value.code or 0), out, err)

    return tell


def plain_file(folder: Path) -> tuple[str, ...]:
    (folder / "f").touch()
    return "--manifest", "m.yaml", "--dry-run", "--dist", "f"


def below_a_file(folder: Path) -> tuple[str, ...]:
    (folder / "f").touch()
    return "--manifest", "m.yaml", "--dry-run", "--dist", "f/dist"


def dangling_link(folder: Path) -> tuple[str, ...]:
    (folder / "dl").symlink_to(folder / "nowhere" / "x")
    return "--manifest", "m.yaml", "--dry-run", "--dist", "dl"


def proc(_: Path) -> tuple[str, ...]:
    return "--manifest", "m.yaml", "--dry-run", "--dist", "/proc/x"


def long_dist(_: Path) -> tuple[str, ...]:
    return "--manifest", "m.yaml", "--dry-run", "--dist", "x" * 5000


def manifest_is_a_folder(folder: Path) -> tuple[str, ...]:
    (folder / "x.yaml").mkdir()
    return "--manifest", "x.yaml", "--dry-run"


def manifest_is_a_fifo(folder: Path) -> tuple[str, ...]:
    os.mkfifo(folder / "x.yaml")
    return "--manifest", "x.yaml", "--dry-run"


def manifest_is_binary(folder: Path) -> tuple[str, ...]:
    (folder / "x.yaml").write_bytes(bytes(range(256)))
    return "--manifest", "x.yaml", "--dry-run"


def manifest_is_nowhere(_: Path) -> tuple[str, ...]:
    return "--manifest", "nowhere.yaml", "--dry-run"


def report_into_a_file(folder: Path) -> tuple[str, ...]:
    (folder / "f").touch()
    return "report", "--manifest", "m.yaml", "-o", "f/r.html"


def report_onto_a_folder(folder: Path) -> tuple[str, ...]:
    (folder / "r.html").mkdir()
    return "report", "--manifest", "m.yaml", "-o", "r.html"


def new_into_proc(_: Path) -> tuple[str, ...]:
    return "new", "--source", "src", "--base", "base", "-o", "/proc/x/m.yaml"


def merge_into_a_file(folder: Path) -> tuple[str, ...]:
    (folder / "f").touch()
    return "merge", "--manifest", "m.yaml", "--out", "f/x"


def deep_config(folder: Path) -> tuple[str, ...]:
    (folder / "dist" / "m" / "adapter_config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    return "compat", "dist/m"


def huge_numbers(folder: Path) -> tuple[str, ...]:
    file = folder / "dist" / "m" / "adapter_config.json"
    config = json.loads(file.read_text()) | {"r": 10**400, "lora_alpha": 10**400}
    file.write_text(json.dumps(config))
    return "compat", "dist/m"


def folder_for_evidence(folder: Path) -> tuple[str, ...]:
    (folder / "dist" / "m" / "extraction.json").unlink()
    (folder / "dist" / "m" / "extraction.json").mkdir()
    return "explain", "q_proj", "--folder", "dist/m"


def template_that_fails(folder: Path) -> tuple[str, ...]:
    (folder / "own_card.md.j2").write_text("{{ nothing.of.the.kind }}")
    text = (folder / "m.yaml").read_text().replace("lora_card.md.j2", "own_card.md.j2")
    (folder / "m.yaml").write_text(text)
    return "card", "--manifest", "m.yaml"


def template_that_is_none(folder: Path) -> tuple[str, ...]:
    (folder / "own_card.md.j2").write_text("{% for %}")
    text = (folder / "m.yaml").read_text().replace("lora_card.md.j2", "own_card.md.j2")
    (folder / "m.yaml").write_text(text)
    return "card", "--manifest", "m.yaml"


def long_tensor_name(folder: Path) -> tuple[str, ...]:
    return rename_tensor(folder, "model.layers.0." + "x" * 4000 + ".weight")


def tensor_name_with_nul(folder: Path) -> tuple[str, ...]:
    return rename_tensor(folder, "model.layers.0.a\0b.weight")


def rename_tensor(folder: Path, name: str) -> tuple[str, ...]:
    for side in ("src", "base"):
        file = folder / side / "model.safetensors"
        weights = load_file(file)
        weights[name] = weights.pop("model.layers.0.mlp.down_proj.weight")
        save_file(weights, file, metadata={"format": "pt"})
    return "--manifest", "m.yaml", "--dry-run"


TROUBLES = [
    (plain_file, 1),
    (below_a_file, 1),
    (dangling_link, 1),
    (proc, 1),
    (long_dist, 1),
    (manifest_is_a_folder, 2),
    (manifest_is_a_fifo, 2),
    (manifest_is_binary, 2),
    (manifest_is_nowhere, 2),
    (report_into_a_file, 1),
    (report_onto_a_folder, 1),
    (new_into_proc, 1),
    (merge_into_a_file, 1),
    (deep_config, 1),
    (huge_numbers, 1),
    (folder_for_evidence, 1),
    (template_that_fails, 1),
    (template_that_is_none, 1),
    (long_tensor_name, 1),
    (tensor_name_with_nul, 1),
]


@pytest.mark.parametrize(("trouble", "code"), TROUBLES, ids=[row[0].__name__ for row in TROUBLES])
def test_trouble_is_one_error_with_a_next_step(own_tiny_run: Path, told: Any, trouble: Any, code: int) -> None:
    found = told(*trouble(own_tiny_run))
    assert "Traceback" not in found.out + found.err
    assert found.code == code, found.err
    assert len(found.errors) == 1, found.err
    assert "fault of publisher" not in found.err
    assert len(found.err) < 6000


def test_a_token_that_no_header_can_hold_is_told_without_showing_it(
    own_tiny_run: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sécret")
    found = told("audit", "some/repository")
    assert found.code == 1
    assert "HF_TOKEN" in found.err
    assert "sécret" not in found.out + found.err
    assert "Traceback" not in found.err
    assert own_tiny_run.is_dir()


def raised(code: str, name: str) -> Exception:
    """The exception of a piece of code that stands in a file of this name."""
    try:
        exec(compile(code, name, "exec"), {})  # noqa: S102 - a stand-in for code of a release
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError(code)


def test_what_a_release_raises_is_told_as_its_own() -> None:
    found = explained(raised("{}['x']", "/somewhere/joint_schema_model.py"))
    assert isinstance(found, LibraryError)
    assert "code of the release (joint_schema_model.py) failed: KeyError: 'x'" in str(found)


def test_what_a_library_raises_is_told_by_its_name() -> None:
    found = explained(raised("import torch; torch.zeros(2) @ torch.zeros(3)", "<own>"))
    assert "RuntimeError" in str(found)
    assert not isinstance(found, SystemTroubleError)
    found = explained(raised("import yaml; yaml.safe_load('[')", "<own>"))
    assert str(found).startswith("yaml failed: ParserError")


def test_a_package_that_is_missing_is_told_with_the_command_that_installs_it() -> None:
    found = explained(ModuleNotFoundError("No module named 'ray'", name="ray"))
    assert "pip install 'lora-publisher[ray]'" in str(found)
    assert "pip install 'lora-publisher[vision]'" in str(explained(ModuleNotFoundError("x", name="torchvision.ops")))


def test_a_full_disk_no_memory_and_too_deep_a_file_are_told_as_such() -> None:
    assert isinstance(explained(OSError(28, "No space left on device", "x")), NoRoomError)
    assert "no more memory" in str(explained(MemoryError()))
    assert "nested too deep" in str(explained(RecursionError()))


def test_anything_else_is_a_fault_of_this_tool_which_says_so(
    own_tiny_run: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("publisher.manifest.reading.BoundedLoader", None)  # a slip in a module of this tool
    found = told("check", str(own_tiny_run / "m.yaml"))
    assert found.code == FaultError.exit_code == 1
    assert "Traceback" not in found.err
    assert "Next: run the same command with -v, and report it" in found.err


# --- one JSON document --------------------------------------------------------------------------------------

ENDINGS = [
    (("audit", "--json"), 2),
    (("audit", "--json", "--no-such-option", "x"), 2),
    (("audit", "no-such-place", "--json"), 2),
    (("audit", "dist/m", "--json"), 0),
    (("compat", "dist/m", "--base", "base", "--json"), 0),
    (("compat", "dist/m", "--base", "base", "--json", "--require", "no such loader"), 2),
    (("compat", "nowhere", "--json"), 1),
    (("explain", "layers.0.self_attn.q_proj", "--folder", "dist/m", "--json"), 0),
    (("explain", "q_proj", "--folder", "dist/m", "--json"), 2),
    (("explain", "no_such_module", "--folder", "dist/m", "--json"), 2),
    (("merge", "--manifest", "m.yaml", "--json"), 2),
    (("merge", "--manifest", "m.yaml", "--out", "merged", "--json"), 0),
    (("--manifest", "m.yaml", "--dry-run", "--json"), 0),
    (("--manifest", "m.yaml", "--dry-run", "--json", "--from", "push", "--until", "fetch"), 2),
    (("extract", "--json", "--manifest", "nowhere.yaml"), 2),
]


@pytest.mark.parametrize(("arguments", "code"), ENDINGS, ids=str)
def test_with_json_stdout_is_one_document_however_the_command_ends(
    own_tiny_run: Path, told: Any, arguments: tuple[str, ...], code: int
) -> None:
    assert own_tiny_run.is_dir()
    found = told(*arguments)
    document = json.loads(found.out)
    assert found.code == code, found.err
    if found.code:
        assert set(document["error"]) == {"kind", "found", "expected", "next"}


def test_a_failed_audit_has_its_table_as_the_document(own_tiny_run: Path, told: Any) -> None:
    (own_tiny_run / "dist" / "m" / "README.md").write_text("# another card\n")
    found = told("audit", "dist/m", "--json")
    assert found.code == 1
    assert "card" in {check["name"] for check in json.loads(found.out)["checks"] if check["status"] == "failed"}


def test_what_a_library_prints_does_not_reach_the_document(
    own_tiny_run: Path, told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def talkative(*_: object, **__: object) -> None:
        print("loading ...")  # noqa: T201 - as libraries do
        raise KeyError("x")

    monkeypatch.setattr("publisher.api.runs.run_stages", talkative)
    found = told("--manifest", str(own_tiny_run / "m.yaml"), "--json")
    assert set(json.loads(found.out)) == {"error"}
    assert "loading ..." in found.err


@pytest.mark.parametrize("name", sorted(name for commands in GROUPS.values() for name in commands))
def test_every_command_takes_v(name: str, told: Any) -> None:
    found = told(name, "-v", "--no-such-option")
    assert "No such option" in found.err
    assert "option -v" not in found.err.replace("'", "").lower()


def test_an_interruption_is_a_document_too(own_tiny_run: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class EndedError(Exception):
        pass

    def leave(code: int) -> None:
        raise EndedError(str(code))

    monkeypatch.setattr("publisher.api.runs.run_stages", interrupted)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(EndedError, match="130"):
        told("--manifest", str(own_tiny_run / "m.yaml"), "--json")


# --- the help page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120, 200])
def test_every_command_stands_on_the_help_page_on_one_whole_line(width: int) -> None:
    page = CliRunner().invoke(cli.cli, ["--help"], terminal_width=width, max_content_width=width).output
    listed = {name: line for commands in GROUPS.values() for name, line in commands.items()}
    assert set(listed) == set(cli.cli.commands)
    for name, line in listed.items():
        assert any(row.split() == [name, *line.split()] for row in page.splitlines()), name
    assert "\b" not in page
    assert "\\b" not in page
    assert "..." not in page.partition("Options:")[2]
    for example in ("publish demo  ", "publish new --source A", "publish audit owner/name"):
        assert any(row.strip().startswith(example) for row in page.splitlines())
    assert max(map(len, page.splitlines())) <= max(width, 80)


def test_the_page_says_what_each_exit_code_means() -> None:
    page = CliRunner().invoke(cli.cli, ["--help"]).output
    assert [row.split()[0] for row in page.partition("Exit codes:")[2].splitlines() if row.strip()][:4] == [
        "0",
        "1",
        "2",
        "130",
    ]


@pytest.mark.parametrize("name", sorted(name for commands in GROUPS.values() for name in commands))
def test_each_command_has_a_help_page_of_its_own(name: str) -> None:
    found = CliRunner().invoke(cli.cli, [name, "--help"], terminal_width=80)
    assert found.exit_code == 0
    assert isinstance(cli.cli.commands[name], click.Command)
    assert f"publish {name}" in found.output.replace("cli ", "publish ")


# --- python -m ----------------------------------------------------------------------------------------------


def test_python_m_imports_nothing_from_the_folder_one_stands_in(tmp_path: Path) -> None:
    for module in ("h2", "torch", "numpy", "click", "json"):
        (tmp_path / f"{module}.py").write_text("open('PWNED', 'w').write('ran')\nraise SystemExit(7)\n")
    command = [sys.executable, "-m", "publisher", "audit", "some/repository"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert not (tmp_path / "PWNED").exists(), done.stderr
    assert done.returncode == 1, done.stderr
