"""What is installed, who made it, and which job may publish: the workflows, their locks and the names in them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import publisher
from publisher.border.installing import DISTRIBUTION, install_command

ROOT = Path(__file__).parents[2]
PACKAGE = Path(publisher.__file__).parent
WORKFLOWS = ROOT / ".github/workflows"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
LOCKS = {
    "build.txt": ["build", *PROJECT["build-system"]["requires"]],
    "release.txt": PROJECT["project"]["dependencies"],
    "release-sign.txt": [*PROJECT["project"]["dependencies"], *EXTRAS["sign"]],
}
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)")
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Pin:
    """A line of a file of requirements: one version of one package, and the digests of its files."""

    version: Version
    digests: int


def pins_in(path: Path) -> dict[str, Pin]:
    """Return the pins by normalised name. Nothing else may be in the file: no address, no option, no open version."""
    pins: dict[str, Pin] = {}
    lines = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for line in lines.replace("\\\n", " ").splitlines():
        name, *digests = line.split()
        found = PIN.fullmatch(name)
        assert found, line
        assert all(DIGEST.fullmatch(digest) for digest in digests), line
        key = canonicalize_name(found[1])
        assert key not in pins, line
        pins[key] = Pin(Version(found[2]), len(digests))
    return pins


def workflow(name: str) -> dict[Any, Any]:
    """Return a workflow as it is parsed; YAML reads its key `on` as true."""
    parsed: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))
    return parsed


def commands(job: dict[str, Any]) -> list[str]:
    """Return the command lines of a job."""
    return [step["run"] for step in job["steps"] if "run" in step]


def recipe(target: str) -> str:
    """Return the lines that make runs for this target."""
    return (ROOT / "Makefile").read_text(encoding="utf-8").split(f"\n{target}: ")[1].split("\n\n")[0]


# --- locks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_of_a_lock_has_digests_and_the_version_that_is_tested(name: str) -> None:
    tested = pins_in(ROOT / "constraints.txt")
    locked = pins_in(ROOT / "requirements" / name)
    assert locked
    assert [package for package, pin in locked.items() if pin.digests == 0] == []
    assert {package: pin.version for package, pin in locked.items()} == {
        package: tested[package].version for package in locked
    }


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_all_that_pyproject_asks_for(name: str) -> None:
    locked = pins_in(ROOT / "requirements" / name)
    for asked in map(Requirement, LOCKS[name]):
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)].version), asked


def test_each_lower_bound_is_the_version_that_is_installed_to_test_it() -> None:
    lowest = pins_in(ROOT / "requirements/lowest.txt")
    groups = [PROJECT["project"]["dependencies"], *EXTRAS.values()]
    asked = [Requirement(text) for group in groups for text in group]
    bounds = {canonicalize_name(each.name): each.specifier for each in asked if each.name != DISTRIBUTION}
    found = {name: [(bound.operator, Version(bound.version)) for bound in bounds[name]] for name in bounds}
    assert found == {name: [(">=", lowest[name].version)] for name in bounds}


def test_the_build_backend_is_pinned_where_no_constraint_reaches() -> None:
    [backend] = map(Requirement, PROJECT["build-system"]["requires"])
    [pin] = backend.specifier
    assert (pin.operator, Version(pin.version)) == ("==", pins_in(ROOT / "constraints.txt")[backend.name].version)


# --- workflows ----------------------------------------------------------------------------------------------


def test_three_jobs_have_more_than_the_right_to_read_and_each_has_only_what_it_needs() -> None:
    entitled = {
        (path.name, name): job["permissions"]
        for path in sorted(WORKFLOWS.glob("*.yml"))
        for name, job in workflow(path.name)["jobs"].items()
        if job["permissions"] not in ({}, {"contents": "read"})
    }
    assert entitled == {
        ("release.yml", "publish"): {"contents": "read", "id-token": "write"},
        ("tool-release.yml", "index"): {"id-token": "write"},
        ("tool-release.yml", "github"): {"contents": "write"},
    }


def test_the_job_that_publishes_clef_installs_by_digest_and_runs_publish_alone() -> None:
    job = workflow("release.yml")["jobs"]["publish"]
    digest, install, *rest = commands(job)
    assert digest.startswith("echo ")
    assert install.split("pip install ")[1].split() == [
        "--require-hashes",
        "--only-binary=:all:",
        *("--requirement", "requirements/release.txt", "--requirement", "wheel.txt"),
    ]
    assert rest
    assert all(command.startswith("publish ") for command in rest)


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_a_workflow_has_no_right_that_a_job_does_not_name(path: Path) -> None:
    assert workflow(path.name)["permissions"] == {}
    assert all("permissions" in job for job in workflow(path.name)["jobs"].values())


def test_the_wheel_is_built_by_tools_with_digests_and_released_after_its_tests() -> None:
    build, test = (workflow("wheel.yml")["jobs"][name] for name in ("build", "test"))
    install, make = commands(build)[:2]
    assert "--require-hashes --only-binary=:all: --requirement requirements/build.txt" in install
    assert make == "python -m build --no-isolation --wheel"
    assert test["needs"] == "build"
    for caller in ("ci.yml", "release.yml", "tool-release.yml"):
        assert workflow(caller)["jobs"]["wheel"]["uses"] == "$/.github/workflows/wheel.yml"
    assert workflow("release.yml")["jobs"]["publish"]["needs"] == "wheel"


@pytest.mark.parametrize(
    ("tag", "started"),
    [("v1.2.0", ["release.yml"]), ("tool-v0.3.0", ["tool-release.yml"]), ("tool-latest", []), ("version", [])],
)
def test_a_tag_starts_the_release_of_clef_or_of_the_tool_and_never_both(tag: str, started: list[str]) -> None:
    patterns = {
        path.name: workflow(path.name)[True].get("push", {}).get("tags", []) for path in WORKFLOWS.glob("*.yml")
    }
    assert sorted(name for name, globs in patterns.items() if any(fnmatchcase(tag, glob) for glob in globs)) == started


def test_the_jobs_that_release_the_tool_take_the_tested_wheel_and_run_no_code_of_the_repository() -> None:
    jobs = workflow("tool-release.yml")["jobs"]
    assert {name: job.get("needs") for name, job in jobs.items()} == {
        "wheel": None,
        "notes": "wheel",
        "index": ["wheel", "notes"],
        "github": ["wheel", "notes", "index"],
    }
    for name, ours in (("index", []), ("github", ["gh"])):
        steps = jobs[name]["steps"]
        uses = [step["uses"].partition("@")[0] for step in steps if "uses" in step]
        assert set(uses) <= {"actions/download-artifact", "pypa/gh-action-pypi-publish"}
        check, *others = commands(jobs[name])
        assert check.endswith("| sha256sum --check --strict")
        assert [command.split()[0] for command in others] == ours
        checking = next(step for step in steps if step.get("run") == check)
        assert checking["env"] == {"DIGEST": "${{ needs.wheel.outputs.digest }}"}
        after = steps[steps.index(checking) + 1 :]
        assert not any("download-artifact" in step.get("uses", "") for step in after)


def test_the_index_gets_the_folder_with_the_checked_wheel_and_an_attestation_of_it() -> None:
    job = workflow("tool-release.yml")["jobs"]["index"]
    *_, upload = job["steps"]
    assert job["environment"] == "package-index"
    assert upload["with"] == {"packages-dir": "wheel", "attestations": True, "print-hash": True}


@pytest.mark.parametrize("path", sorted(WORKFLOWS.glob("*.yml")), ids=lambda path: path.name)
def test_every_action_is_pinned_by_its_commit(path: Path) -> None:
    used = [line.split("uses: ")[1] for line in path.read_text(encoding="utf-8").splitlines() if "uses: " in line]
    foreign = [action for action in used if not action.startswith("$/")]
    assert [action for action in foreign if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v[\d.]+", action)] == []


def test_before_a_commit_the_tools_of_make_lint_run_and_nothing_is_fetched() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    asked = [hook["entry"].split() for hook in hooks[0]["hooks"]]
    assert {hook["language"] for hook in hooks[0]["hooks"]} == {"system"}
    lint = re.findall(r"^\t\$\(BIN\)/(\S+)(?: (check|format))?", recipe("lint"), flags=re.MULTILINE)
    python_tools = [
        [f".venv/bin/{tool}", *filter(None, [verb])] for tool, verb in lint if tool not in {"zizmor", "actionlint"}
    ]
    assert [words[: len(expected)] for words, expected in zip(asked, python_tools, strict=True)] == python_tools


def test_the_release_workflow_bears_the_name_of_its_file_and_the_documentation_says_so() -> None:
    assert workflow("release.yml")["name"] == "release.yml"
    assert "| `workflow` | `release.yml`," in (ROOT / "docs/releasing.md").read_text(encoding="utf-8")


def test_all_tests_are_collected_wherever_the_suite_runs() -> None:
    options = PROJECT["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
    assert [option for option in options["addopts"] if option.startswith("--ignore")] == ["--ignore=tests/browser"]
    assert "pytest tests/browser" in (ROOT / "Makefile").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "tests").rglob("*.py") if "\ndef test_" in path.read_text(encoding="utf-8")]
    assert [path for path in files if not path.name.startswith("test_")] == []
    runs = [line for name in ("wheel.yml", "ci.yml") for job in workflow(name)["jobs"].values() if "steps" in job
            for line in commands(job) if "pytest" in line]  # fmt: skip
    assert runs == ["python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder"] * 2


# --- the wheel itself ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runner:
    """A machine on which commands of the workflows run, in a checkout without this project's history."""

    folder: Path

    def run(self, command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """One command line, as a GitHub step runs it."""
        paths = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(self.folder / "output")}
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder / "checkout",
            env={**os.environ, **paths, **environment},
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A checkout of what the wheel is made of, and the Python that runs this."""
    checkout = tmp_path / "checkout"
    beside = shutil.ignore_patterns("__pycache__", "templates", "manifests")  # the wheel gets these from beside it
    shutil.copytree(PACKAGE, checkout / "publisher", ignore=beside)
    for folder in ("templates", "manifests"):
        shutil.copytree(ROOT / folder, checkout / folder)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / file, checkout / file)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o700)
    return Runner(tmp_path)


def test_the_wheel_that_was_tested_is_installed_and_no_other(runner: Runner) -> None:
    wheel, digest = build_wheel(runner)
    checkout = runner.folder / "checkout"
    assert wheel.name == f"lora_publisher-{publisher.__version__}-py3-none-any.whl"

    [check, *_] = commands(workflow("wheel.yml")["jobs"]["test"])
    [state, *_] = commands(workflow("release.yml")["jobs"]["publish"])
    assert runner.run(check, DIGEST=digest).returncode == 0
    assert runner.run(state, DIGEST=digest).returncode == 0
    install = "python -m pip install --no-deps --no-index --require-hashes --requirement wheel.txt --target installed"
    done = runner.run(install)
    assert done.returncode == 0, done.stderr
    assert (checkout / "installed/bin/publish").is_file()
    there = "import publisher.cli.app; print(publisher.__file__, publisher.__version__)"
    done = runner.run(f"python -P -c '{there}'", PYTHONPATH=str(checkout / "installed"))
    assert done.stdout.split() == [str(checkout / "installed/publisher/__init__.py"), publisher.__version__]

    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert runner.run(check, DIGEST=digest).returncode == 1
    refused = runner.run(f"{install}-again")
    assert refused.returncode == 1
    assert "DO NOT MATCH THE HASHES" in refused.stderr


def build_wheel(runner: Runner) -> tuple[Path, str]:
    """Build the wheel by the workflow's own commands, and return it, as download leaves it, with its digest."""
    for command in commands(workflow("wheel.yml")["jobs"]["build"])[1:]:  # but for the installation of its tools
        done = runner.run(command)
        assert done.returncode == 0, done.stderr
    digest = (runner.folder / "output").read_text(encoding="utf-8").strip().removeprefix("digest=")
    (runner.folder / "checkout/dist").rename(runner.folder / "checkout/wheel")
    [wheel] = (runner.folder / "checkout/wheel").iterdir()
    return wheel, digest


def test_the_wheel_holds_the_templates_and_the_demo_and_no_manifest_of_a_release(runner: Runner) -> None:
    wheel, _ = build_wheel(runner)
    names = zipfile.ZipFile(wheel).namelist()
    assert "publisher/templates/lora_card.md.j2" in names
    assert [name for name in names if name.startswith("publisher/manifests/")] == ["publisher/manifests/demo.yaml"]


def test_the_tool_is_released_under_its_own_version_with_what_the_changelog_says_of_it(runner: Runner) -> None:
    wheel, digest = build_wheel(runner)
    changelog = (
        "# Changelog\n\n## Unreleased\n\n- Later.\n\n## {}\n\n- This.\n\n### Fixed\n\n- That.\n\n## 0.0.1\n\n- Old.\n"
    )
    (runner.folder / "checkout/CHANGELOG.md").write_text(changelog.format(publisher.__version__), encoding="utf-8")
    same_version, write_notes, some_notes = commands(workflow("tool-release.yml")["jobs"]["notes"])
    tag = f"tool-v{publisher.__version__}"
    for command in (same_version, write_notes, some_notes):
        assert runner.run(command, GITHUB_REF_NAME=tag).returncode == 0
    notes = (runner.folder / "checkout/notes.md").read_text(encoding="utf-8")
    assert notes == "\n- This.\n\n### Fixed\n\n- That.\n\n"

    assert runner.run(same_version, GITHUB_REF_NAME="tool-v99.0.0").returncode == 1
    assert runner.run(write_notes, GITHUB_REF_NAME="tool-v99.0.0").returncode == 0
    assert runner.run(some_notes).returncode == 1

    for job in ("index", "github"):
        [check, *_] = commands(workflow("tool-release.yml")["jobs"][job])
        assert runner.run(check, DIGEST=digest).returncode == 0
        assert runner.run(check, DIGEST="0" * 64).returncode == 1
        wheel.with_name("another-1-py3-none-any.whl").write_bytes(b"")
        assert runner.run(check, DIGEST=digest).returncode == 1
        wheel.with_name("another-1-py3-none-any.whl").unlink()


def test_the_changelog_has_a_section_for_the_version_in_the_sources() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert publisher.__version__ in headings


# --- the name -----------------------------------------------------------------------------------------------


def test_the_distribution_has_the_name_that_messages_and_metadata_look_for() -> None:
    assert PROJECT["project"]["name"] == DISTRIBUTION
    assert install_command("ray") == "pip install 'lora-publisher[ray]'"
    assert EXTRAS.keys() >= {"gguf", "localhub", "ray", "sign"}


def pages() -> list[Path]:
    """Return all that a reader may take a command from, and the sources with their messages."""
    kinds = [(PACKAGE, "*.py"), (ROOT / "docs", "*.md"), (ROOT / "templates", "*.j2"), (ROOT / "benchmarks", "*.py")]
    names = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "pyproject.toml")
    return [*(ROOT / name for name in names), *(path for folder, kind in kinds for path in folder.rglob(kind))]


def test_no_page_and_no_message_has_a_reader_install_anothers_project() -> None:
    wrong = re.compile(
        r"(?<!lora-)publisher\[\w*\]"  # an extra of it
        r"|(?<!lora-)publisher @ git"
        r"|pip3? install (?:-{1,2}\S+ )*['\"]?publisher\b"
    )
    found = {str(path): wrong.findall(path.read_text(encoding="utf-8")) for path in pages()}
    assert {path: names for path, names in found.items() if names} == {}


def test_one_module_alone_says_how_the_tool_is_installed() -> None:
    naming = [path for path in PACKAGE.rglob("*.py") if DISTRIBUTION in path.read_text(encoding="utf-8")]
    assert naming == [PACKAGE / "border" / "installing.py"]
