"""Every command that the README and docs/ show is run, as it is written there, and does what SHOWN says of it.

Placeholders stand for the demo with fewer layers: M is a manifest, `owner/name` a published repository. A local Hub
stands behind HF_ENDPOINT. The commands run in the process of the test, but for those that need a shell.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, close_session
from safetensors.torch import load_file, save_file

import publisher
from publisher.hub.local import LocalHub
from tests.commands import Answer, publish_as

pytestmark = pytest.mark.usefixtures("quick_read_back")

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PUBLISHED = "moondream/clef-lora"
MANIFEST = """\
version: 1
repo: {repo}
license: apache-2.0
variants:
  - path: /
    label: Clef-flash in small
    source:
      repo: o/clef-flash
      revision: {source}
    base:
      repo: o/clef-flash-base
      revision: {base}
    model_class: Qwen3_5ForConditionalGeneration
    adapter: {{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: FEATURE_EXTRACTION}}
card:
  template: lora_card.md.j2
  title: clef-lora
  summary: The adapter of a small pair, from a Hub on this machine.
"""

# what stands in for a placeholder, where a command is not run word for word
STAND_INS = {
    "COMMAND": "audit",
    "MANIFEST": "manifests/clef.yaml",
    "TARGET": PUBLISHED,
    "M...": "manifests/demo.yaml manifests/clef.yaml",
    "M": "manifests/demo.yaml",
    "REPO[@REVISION]": f"{PUBLISHED}@v1.0",
    "REPO": PUBLISHED,
    "dist/NAME": "dist/demo",
    "MODULE": "layers.3.self_attn.v_proj",
    "--source DIR_OR_REPO": "--source demo/clef-flash",
    "--base DIR_OR_REPO": "--base o/clef-flash-base",
    "ADAPTER_DIR --base DIR --repair": "adapters/others --base DIR --repair",
    "ADAPTER_DIR": "dist/demo",
    "--source S": "--source demo/clef-flash",
    "--base DIR": "--base demo/clef-base",
}
OF_A_SHELL = re.compile(r"[>*]")
# The first that fits a command says what it prints (a pattern), and which file it leaves.
PUBLISHED_WHOLE = r"read back \w{8}: 8 files equal, 1 adapters load with PEFT"
SHOWN: dict[str, tuple[str, str]] = {
    r"publish --(hub local|until extract)$": (r"\AUsage: publish \[OPTIONS\]", ""),
    r"publish audit --help": (r"\AUsage: publish audit \[OPTIONS\]", ""),
    r".* --until (validate|loaders)": (
        r"in small: PEFT loads all 31 modules, figures agree",
        "dist/*/adapter_model.safetensors",
    ),
    r".* --dry-run": (r"commit to \w+/clef-lora, compared with", "dist/*/README.md"),
    r"publish --manifest \S*demo.yaml --hub local": (
        r"16 files equal, 2 adapters load with PEFT",
        "dist/demo.work/hub",
    ),
    r"publish --manifest .* --tag v1\.2\.0": (rf"(?s), tagged v1\.2\.0: .*{PUBLISHED_WHOLE}", "dist/clef/README.md"),
    r"publish --manifest ": (PUBLISHED_WHOLE, "dist/clef/README.md"),
    r"publish card .*--check": (r"\Acard is fresh: dist/demo/README.md$", ""),
    r"publish card .*--from-hub": (r"\Athe published card is what its evidence gives$", ""),
    r"publish card ": (r"\Acard (written|unchanged): dist/demo/README.md$", "dist/demo/README.md"),
    r"publish merge .*--out (?P<out>\w+)": (r": 31 linears merged; \d+ files of weights", "{out}/model-00001-of-*"),
    r"publish report .*-o page.html": (r"\Areport: page.html$", "page.html"),
    r"publish report ": (r"\Areport: dist/demo.html$", "dist/demo.html"),
    r"publish explain ": (r"^verdict +whole: what is missing is what merge rounding explains$", ""),
    r"publish compat .*--repair (?P<out>\w+)": (
        r"\Arepaired: \d+ tensors renamed: names begin as PEFT's do$",
        "{out}/adapter_model.safetensors",
    ),
    r"publish compat .*--json": (r'"loader": "PEFT",\s+"loads": "yes"', ""),
    r"publish compat ": (r"^ +PEFT +\S+ +executed +yes +right", ""),
    r"publish audit .*--deep": (r": \d+ passed, 0 failed", ""),
    r"publish audit .*--json": (r'"status": "passed"', ""),
    r"publish audit ": (r": \d+ passed, 0 failed, \d+ not checked$", ""),
    r"publish new .*> manifests/tuned.yaml": (r"\A\Z", "manifests/tuned.yaml"),
    r"publish new ": (r"\A(#.*\n)*version: 1\n", ""),
    r"publish pin (?P<manifest>\S+)": (r"\A\S+\.yaml: nothing to pin$", ""),
    r"publish check ": (r"\A(manifests/\w+\.yaml: ok\n)+\Z", ""),
    r"publish extract ": (r"^ +Clef-flash in small +31 +0-3 of 4 ", "dist/clef/adapter_model.safetensors"),
    r"publish verify ": (r"^ +Clef(-flash)? in small +Demo requests +24 +72 ", "dist/demo/verification.json"),
}
# these publish or read what only a manifest of Hub checkpoints has
OF_THE_HUB = ("--tag", "--from-hub", "--pr", "--stream", "--from card")


def documented() -> list[str]:
    """The commands in code blocks, and those in backticks that are more than a name."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        shown = re.findall(r"^(?: {4}|\$ )\s*((?:publish|make) [^\n]*)", text, re.MULTILINE)
        mentioned = re.findall(r"`(publish [^`]+ [^`]+)`", text.replace("\n", " "))
        found |= dict.fromkeys(re.split(r"\s{2,}|\s+#", command)[0].strip() for command in shown + mentioned)
    return list(found)


COMMANDS = documented()


@dataclass(frozen=True)
class World:
    """A folder with checkpoints of the demo's kind and their results, and the environment of a user."""

    folder: Path
    environment: dict[str, str]
    hub: LocalHub

    def run(self, command: str) -> Answer:
        """Run one command line, as a user types it: in a shell only where it needs one."""
        if not OF_A_SHELL.search(command):
            return publish_as(command, folder=self.folder, environment=self.environment)
        shell = ["bash", "-c", command]
        done = subprocess.run(shell, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def world(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    for name in ("demo", "models", "manifests", "bin"):
        (folder / name).mkdir()
    for pair in (path for path in (small_run / "demo").iterdir() if path.is_dir()):
        (folder / "demo" / pair.name).symlink_to(pair)
    (folder / "models" / "tuned").symlink_to(small_run / "demo" / "clef-flash")
    subprocess.run(["cp", "-r", small_run / "dist", folder / "dist"], check=True)
    without_prefix(folder / "dist" / "demo", folder / "adapters" / "others")
    script = folder / "bin" / "publish"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m publisher "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    with LocalHub(folder / "local-hub-data") as hub:
        fill(hub, folder)
        shutil.copy(small_run / "demo.yaml", folder / "manifests")
        yield World(folder, environment(hub, folder), hub)
        close_session()


def without_prefix(adapter: Path, copy: Path) -> None:
    """A copy of an adapter as others write some: its tensors lack PEFT's prefix."""
    copy.mkdir(parents=True)
    shutil.copy(adapter / "adapter_config.json", copy)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors = {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, copy / "adapter_model.safetensors", metadata={"format": "pt"})


def fill(hub: LocalHub, folder: Path) -> None:
    """Checkpoints, an empty repository to publish to, and the manifest that names them."""
    api = HfApi(endpoint=hub.endpoint, token=hub.token)
    for repo, pair in (
        ("o/clef-flash", "clef-flash"),
        ("o/clef-flash-base", "clef-flash-base"),
        ("someone/base", "clef-flash-base"),
    ):
        files = [path for path in (folder / "demo" / pair).iterdir() if path.is_file()]
        api.create_repo(repo)
        api.create_commit(repo, [CommitOperationAdd(f.name, f) for f in files], commit_message="weights")
    api.create_repo(PUBLISHED)
    pins = {"source": hub.repository("o/clef-flash").head(), "base": hub.repository("o/clef-flash-base").head()}
    (folder / "manifests" / "clef.yaml").write_text(MANIFEST.format(repo=PUBLISHED, **pins), encoding="utf-8")


def environment(hub: LocalHub, folder: Path) -> dict[str, str]:
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(publisher.__file__).parents[1]),
        "HOME": str(folder / "home"),
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(folder / "home/hf"),
        "NO_PROXY": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",  # not the cluster of another test
    }


@pytest.fixture(scope="module")
def released(world: World) -> World:
    """The world in which manifests/clef.yaml was published as v1.0."""
    done = world.run("publish --manifest manifests/clef.yaml --tag v1.0")
    assert done.returncode == 0, done.stderr
    return world


def as_run(command: str) -> str:
    """The command with its placeholders filled in."""
    stand_ins = STAND_INS | ({"M": "manifests/clef.yaml"} if any(word in command for word in OF_THE_HUB) else {})
    for placeholder, stand_in in stand_ins.items():
        command = re.sub(rf"(?<!\S){re.escape(placeholder)}(?!\S)", stand_in, command)
    return command.replace("owner/name", PUBLISHED)


def publish_commands() -> list[str]:
    """Each command line once, however often it is shown."""
    shown = (command for command in COMMANDS if command.startswith("publish ") and "publish hub" not in command)
    return list(dict.fromkeys(as_run(command) for command in shown))


def test_the_pages_show_commands() -> None:
    assert {"publish --manifest M --dry-run", "publish audit owner/name --deep", "make demo"} <= set(COMMANDS)


@pytest.mark.parametrize("command", publish_commands())
def test_a_documented_command_does_what_it_says(released: World, command: str) -> None:
    done = released.run(command)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    fitting = (found for pattern in SHOWN if (found := re.match(pattern, command)))
    fit = next(fitting, None)
    assert fit is not None, "say in SHOWN what it does"
    printed, left = SHOWN[fit.re.pattern]
    assert re.search(printed, done.stdout, re.MULTILINE), done.stdout
    assert not left or list(released.folder.glob(left.format(**fit.groupdict()))), left
    assert "--json" not in command or json.loads(done.stdout)
    assert not (released.folder / "home/.ray").exists(), "a token there would be asked for by all later clusters"


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("publish hub")])
def test_a_documented_hub_starts_says_where_it_is_and_stops(world: World, command: str) -> None:
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=world.folder, env=world.environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("# local Hub")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("make ")])
def test_a_documented_target_is_in_the_makefile(command: str) -> None:
    planned = subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr
