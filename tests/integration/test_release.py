"""A release as a publisher makes it: the rehearsal, and the release workflow's own commands, step by step.

The workflow's commands run as processes, the others in the process of the test, each with the environment that GitHub
would give it alone, and a local Hub behind HF_ENDPOINT.
No token may show in anything they leave or say.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import CommitOperationAdd, HfApi, close_session

import publisher
from publisher.hub.local import Fault, LocalHub, Role
from publisher.pipeline.markers import mark, marked
from publisher.records.filenames import ADAPTER, EXTRACTION
from publisher.records.validation import Validation
from tests.commands import Answer, publish_as

pytestmark = pytest.mark.usefixtures("quick_read_back")

WORKFLOW = Path(__file__).parents[2] / ".github/workflows/release.yml"
REPO = "moondream/clef-lora"
CLAIMS = {"repository": "m/publisher", "workflow": "release.yml", "environment": "release", "ref": "refs/tags/v1.2.0"}
TRUSTED = {name: CLAIMS[name] for name in ("repository", "workflow", "environment")}
PLANTED, READ_ONLY = "hf_pl4ntedSecret", "hf_r34donlySecret"
SECRETS = (PLANTED, READ_ONLY, "hf_jwt_", "Bearer ")
TITLE = "Publish clef-lora"


@dataclass(frozen=True)
class Desk:
    """A folder to work in, and the environment of the commands that run there."""

    folder: Path
    environment: Mapping[str, str]

    def publish(self, command: str, **extra: str) -> Answer:
        """Run `publish ...` in the process of the test, with this environment alone."""
        return publish_as(command, folder=self.folder, environment={**self.environment, **extra})

    def run(self, command: str, **extra: str) -> "subprocess.CompletedProcess[str]":
        """Run one command line as a GitHub step does."""
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.folder,
            env={**self.environment, **extra},
            capture_output=True,
            text=True,
            check=False,
        )

    def holds_secret(self) -> list[str]:
        """Files with a token in them: what was written here, caches and logs included."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return [str(path) for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS)]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `publish`, as an installation would have it."""
    folder = tmp_path_factory.mktemp("bin")
    script = folder / "publish"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m publisher "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    return folder


def desk(folder: Path, commands: Path, **environment: str) -> Desk:
    """A fresh folder, with nothing of this process's own environment that could matter."""
    folder.mkdir(exist_ok=True)
    base = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(publisher.__file__).parents[1]),
        "HOME": str(folder / "home"),
        "HF_HOME": str(folder / "home/hf"),
        "NO_PROXY": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
    }
    return Desk(folder, base | environment)


# --- the rehearsal ------------------------------------------------------------------------------------------

LOAD = """
import json, sys
from peft import PeftModel
from transformers import Qwen3_5ForConditionalGeneration
base = Qwen3_5ForConditionalGeneration.from_pretrained("demo/clef-flash-base")
model = PeftModel.from_pretrained(base, "demo/clef-lora", subfolder="clef-flash", revision=sys.argv[1])
factors = [parameter for name, parameter in model.named_parameters() if ".lora_B." in name]
print(json.dumps([len(factors), all(bool(factor.any()) for factor in factors)]))
"""


def test_a_rehearsal_publishes_and_tags_and_a_second_one_finds_nothing_to_do(
    own_small_run: Path, commands: Path, tmp_path: Path
) -> None:
    here = desk(own_small_run, commands, HF_TOKEN=PLANTED)
    command = "publish --manifest demo.yaml --hub local --device cpu --json"
    outcomes = []
    for options in ("--tag v1.2.0", "--tag v1.2.0 -v"):
        done = here.publish(f"{command} {options}")
        assert done.returncode == 0, done.stderr
        assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
        outcomes.append(json.loads(done.stdout))
    first, second = (outcome["push"] for outcome in outcomes)
    assert (first["result"], first["tag"], first["read_back"]["adapters"]) == ("committed", "v1.2.0", 2)
    assert (second["result"], second["commit"]) == ("no changes", first["commit"])
    assert [variant["reused"] for variant in outcomes[1]["variants"]] == [
        ["extract", "validate", "loaders", "verify"]
    ] * 2
    with LocalHub(here.folder / "dist/demo.work/hub") as hub:
        assert hub.repository("demo/clef-lora").head("v1.2.0") == first["commit"]
        reader = Desk(
            here.folder, {**here.environment, "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "empty")}
        )
        loaded = reader.run(f"{sys.executable} -c '{LOAD}' {first['commit']}", HF_TOKEN="")
        assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout) == [31, True]
    assert here.holds_secret() == []


# --- the workflow -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, small_run: Path) -> Iterator[LocalHub]:
    """A Hub with the small pair, public, and the repository to publish to, which trusts the release workflow."""
    tokens = {PLANTED: Role.WRITE, READ_ONLY: Role.READ}
    with LocalHub(tmp_path_factory.mktemp("hub") / "data", tokens) as running:
        api = HfApi(endpoint=running.endpoint, token=running.token)
        for name in ("clef-flash", "clef-flash-base"):
            files = [path for path in (small_run / "demo" / name).iterdir() if path.is_file()]
            api.create_repo(f"o/{name}")
            api.create_commit(f"o/{name}", [CommitOperationAdd(f.name, f) for f in files], commit_message="weights")
        api.create_repo(REPO)
        running.trusted_publishers.trust(REPO, TRUSTED)
        yield running
        close_session()
    for repository in running.repositories():
        assert repository.fsck() == ()


def write_manifest(hub: LocalHub, folder: Path, *, summary: str = "Taken back out.") -> None:
    """manifests/clef.yaml, for the small pair."""
    pins = {
        role: {"repo": f"o/{name}", "revision": hub.repository(f"o/{name}").head()}
        for role, name in (("source", "clef-flash"), ("base", "clef-flash-base"))
    }
    adapter = {"method": "svd", "rank": "auto", "dtype": "bfloat16", "layout": "pattern"}
    variant = {
        "path": "/",
        "label": "Clef-flash in small",
        **pins,
        "model_class": "Qwen3_5ForConditionalGeneration",
        "adapter": {**adapter, "task_type": "FEATURE_EXTRACTION"},
        "expect": {"linears": 31, "layers": "0-3"},
    }
    card = {"template": "lora_card.md.j2", "title": "clef-lora", "summary": summary}
    manifest = {"version": 1, "repo": REPO, "license": "apache-2.0", "variants": [variant], "card": card}
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests/clef.yaml").write_text(yaml.safe_dump(manifest, sort_keys=False), encoding="utf-8")


def job() -> dict[str, Any]:
    """The job that publishes."""
    workflow: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return workflow["jobs"]["publish"]


def run_steps(here: Desk) -> "list[subprocess.CompletedProcess[str]]":
    """The job's own commands, from the installation (that is for test_supply_chain.py) to the first that fails."""
    results: list[subprocess.CompletedProcess[str]] = []
    for step in job()["steps"]:
        if step.get("run", "").startswith("publish "):
            results.append(here.run(step["run"], **step.get("env", {})))
            if results[-1].returncode != 0:
                break
    return results


@pytest.fixture(scope="module")
def released(hub: LocalHub, commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """The folder in which the workflow has published v1.2.0."""
    here = github_desk(hub, tmp_path_factory.mktemp("release") / "desk", commands, CLAIMS)
    results = run_steps(here)
    assert [done.returncode for done in results] == [0, 0], results[-1].stderr
    (here.folder / "log.txt").write_text("".join(done.stdout + done.stderr for done in results), encoding="utf-8")
    return here


def github_desk(hub: LocalHub, folder: Path, commands: Path, claims: Mapping[str, str]) -> Desk:
    """A GitHub job with these claims, on the tag v1.2.0."""
    environment = {**hub.github.job(claims), "GITHUB_REF_NAME": "v1.2.0", "HF_ENDPOINT": hub.endpoint}
    here = desk(folder, commands, **environment)
    write_manifest(hub, here.folder)
    return here


def titles(hub: LocalHub) -> list[str]:
    return [commit.title for commit in hub.repository(REPO).commits()]


def test_a_job_with_a_wrong_claim_fails_before_any_extraction(hub: LocalHub, commands: Path, tmp_path: Path) -> None:
    commits, before = titles(hub), len(hub.requests)
    here = github_desk(hub, tmp_path / "desk", commands, {**CLAIMS, "environment": "staging"})
    check, publish = run_steps(here)
    assert (check.returncode, publish.returncode) == (0, 1)
    assert "trusted publishing was refused: local Hub: invalid_grant" in publish.stderr
    assert json.loads((here.folder / "outcome.json").read_text())["error"]["kind"] == "HubError"
    assert not (here.folder / "dist").exists()
    assert not any("safetensors" in line for line in hub.requests[before:])
    assert titles(hub) == commits
    assert here.holds_secret() == []


def test_the_workflows_own_commands_publish_and_tag(hub: LocalHub, released: Desk) -> None:
    outcome = json.loads((released.folder / "outcome.json").read_text())["push"]
    assert (outcome["result"], outcome["tag"]) == ("committed", "v1.2.0")
    assert outcome["read_back"] == {"files": 8, "adapters": 1}
    assert outcome["commit"] == hub.repository(REPO).head("v1.2.0")
    assert titles(hub)[-2:] == [f"{TITLE} v1.2.0", "initial commit"]


def test_what_the_workflow_keeps_is_there_and_holds_no_token(released: Desk) -> None:
    kept = next(step["with"]["path"] for step in job()["steps"] if "upload-artifact" in step.get("uses", ""))
    for pattern in kept.split():
        assert list(released.folder.glob(pattern)), pattern
    assert released.holds_secret() == []


# --- evidence made elsewhere --------------------------------------------------------------------------------


@pytest.fixture
def carried(hub: LocalHub, released: Desk, commands: Path, tmp_path: Path) -> Iterator[Desk]:
    """Another machine with the evidence of the first one and a token in HF_TOKEN, where no weights can be had."""
    here = desk(tmp_path / "desk", commands, HF_ENDPOINT=hub.endpoint, HF_TOKEN=PLANTED)
    write_manifest(hub, here.folder, summary=f"Carried to {tmp_path.name}.")
    shutil.copytree(released.folder / "dist/clef", here.folder / "dist/clef")
    for marker in (released.folder / "dist/clef.work").rglob("*.json"):
        copy = here.folder / marker.relative_to(released.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(marker, copy)
    for method in ("HEAD", "GET"):
        hub.faults.add(Fault(method, r"^/o/.*/model.*safetensors", status=404, times=999))
    yield here
    hub.faults.clear()


def judge_elsewhere(here: Desk) -> None:
    """As if the evidence had been judged by another PEFT."""
    work = here.folder / "dist/clef.work/root"
    validation = Validation.read(work / "validation.json")
    other = validation.model_copy(update={"packages": {**validation.packages, "peft": "0.18.0"}})
    other.write(work / "validation.json")
    found = marked(work / "validate.json")
    assert found is not None
    mark(work / "validate.json", found.key, folder=work, files=[work / "validation.json"])


def test_evidence_that_holds_is_published_where_no_weights_can_be_had(hub: LocalHub, carried: Desk) -> None:
    judge_elsewhere(carried)
    before = len(hub.requests)
    done = carried.publish("publish --manifest manifests/clef.yaml --tag v1.2.1 --json -v")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["variants"][0]["reused"] == ["extract", "validate"]
    assert (outcome["push"]["result"], outcome["push"]["tag"]) == ("committed", "v1.2.1")
    assert outcome["push"]["commit"] == hub.repository(REPO).head("v1.2.1")
    assert "dist/clef: what rests on fetch holds, so it does not run" in done.stderr
    assert "loading dist/clef with the packages installed here" in done.stderr
    assert not any("/o/" in line and "safetensors" in line for line in hub.requests[before:])
    assert not any(secret in done.stdout + done.stderr for secret in SECRETS)
    assert carried.holds_secret() == []


def change_a_byte(here: Desk) -> str:
    adapter = here.folder / "dist/clef" / ADAPTER
    content = bytearray(adapter.read_bytes())
    content[-1] ^= 1
    adapter.write_bytes(content)
    return f"{ADAPTER} changed since"


def change_a_figure(here: Desk) -> str:
    evidence = here.folder / "dist/clef" / EXTRACTION
    evidence.write_text(evidence.read_text().replace('"linears": 31', '"linears": 32'))
    return f"{EXTRACTION} changed since"


def lose_the_validation(here: Desk) -> str:
    (here.folder / "dist/clef.work/root/validate.json").unlink()
    return "validate.json does not exist"


def ask_for_another_rank(here: Desk) -> str:
    manifest = here.folder / "manifests/clef.yaml"
    manifest.write_text(manifest.read_text().replace("rank: auto", "rank: 12"))
    return "was written for other files, settings or code"


@pytest.mark.parametrize("spoil", [change_a_byte, change_a_figure, lose_the_validation, ask_for_another_rank])
def test_evidence_that_does_not_hold_is_not_published(hub: LocalHub, carried: Desk, spoil: Any) -> None:
    commits, why = titles(hub), spoil(carried)
    done = carried.publish("publish --manifest manifests/clef.yaml --tag v1.3.0")
    assert done.returncode == 1
    assert why in done.stderr
    assert "error: the Hub at" in done.stderr  # where it would have fetched the weights
    assert titles(hub) == commits


@pytest.mark.parametrize("spoil", [change_a_byte, change_a_figure, lose_the_validation])
def test_evidence_that_is_all_there_is_may_be_demanded_to_hold(hub: LocalHub, carried: Desk, spoil: Any) -> None:
    commits = titles(hub)
    spoil(carried)
    done = carried.publish("publish --manifest manifests/clef.yaml --tag v1.3.0 --from card")
    assert done.returncode == 1
    assert "error: dist/clef has not passed validation as it is now" in done.stderr
    assert titles(hub) == commits


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "options", "fault", "message"),
    [
        (READ_ONLY, "", None, "for reading only"),
        (PLANTED[::-1], "", None, "does not accept this token"),
        (PLANTED + "\x0bx", "", None, "a character that cannot be sent"),
        (PLANTED, "--tag v1.2.0", Fault("POST", f"/{REPO}/commit/", status=503), "the tag v1.2.0"),
        pytest.param(
            *(PLANTED, "--tag v1.4.0", Fault("POST", f"/{REPO}/commit/", status=429), "nothing was written"),
            marks=pytest.mark.long,  # the client waits before it asks again
        ),
        pytest.param(
            *(PLANTED, "--pr", Fault("POST", f"/{REPO}/commit/", cut=True), "nothing was written"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_no_failure_shows_a_token(
    hub: LocalHub, carried: Desk, token: str, options: str, fault: Fault | None, message: str
) -> None:
    commits = titles(hub)
    if fault is not None:
        hub.faults.add(fault)
    done = carried.publish(f"publish --manifest manifests/clef.yaml {options} --json -v", HF_TOKEN=token)
    assert done.returncode == 1
    assert message in json.loads(done.stdout)["error"]["found"]
    assert "Traceback" in done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in (*SECRETS, PLANTED[::-1]))
    assert carried.holds_secret() == []
    assert titles(hub) == commits
