"""The whole job on the demo's pairs: what is staged, what is reused, what the command line answers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from publisher.errors import ExtractionError, FetchError, ManifestError, PushError
from publisher.pipeline.run import Run, run
from publisher.records.extraction import Extraction
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from publisher.records.verification import Verification
from tests.commands import Answer, publish, publish_as

ROOT = Path(__file__).parents[2]
MANIFEST, STAGED, WORK = Path("demo.yaml"), Path("dist/demo"), Path("dist/demo.work")
CHARTS = ("errors.svg", "spectrum.svg")
EVIDENCE = ("extraction.json", "loaders.json", "verification.json")
PER_VARIANT = ("adapter_config.json", "adapter_model.safetensors", *EVIDENCE)
BOTH = ("extract", "validate")
ALL = (*BOTH, "loaders", "verify")

pytestmark = pytest.mark.usefixtures("own_small_run")


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def rerun(**options: Any) -> Outcome:
    return run(Run(MANIFEST, Path("dist"), device="cpu", dry_run=True, **options), silent)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_manifest(change: str, to: str) -> None:
    text = MANIFEST.read_text()
    assert text.count(change) == 1, change
    MANIFEST.write_text(text.replace(change, to))


# --- what is staged -----------------------------------------------------------------------------------------


def test_the_staged_tree_is_the_release_and_nothing_else(small_run: Path) -> None:
    variants = {f"{folder}{name}" for folder in ("", "clef-flash/") for name in (*PER_VARIANT, *CHARTS)}
    assert content(small_run / STAGED).keys() == {"README.md", "manifest.yaml", *variants}
    assert (small_run / STAGED / "manifest.yaml").read_bytes() == (small_run / MANIFEST).read_bytes()


def test_both_variants_are_verified_one_on_images_and_one_on_an_fp8_base(small_run: Path) -> None:
    large, small = (Verification.read(small_run / STAGED / at / "verification.json") for at in ("", "clef-flash"))
    assert [one.name for one in large.sets] == ["Demo requests", "Demo requests with images"]
    for one in (*large.sets, *small.sets):
        assert (one.failed, one.gold is None) == (0, False)
        assert 0 < one.max_kl < 0.005
    assert small.fp8 is not None
    assert small.fp8.linears == 31
    assert small.fp8.sets[0].max_kl > small.sets[0].max_kl
    card = (small_run / STAGED / "README.md").read_text()
    for line in ("| Clef in small | Demo requests with images, 12 requests (24 questions) |", "## On the FP8 base"):
        assert line in card


@pytest.mark.parametrize(("folder", "linears", "layers"), [("", 31, "4-7"), ("clef-flash", 31, "0-3")])
def test_each_variant_has_its_modules_and_layers(small_run: Path, folder: str, linears: int, layers: str) -> None:
    extraction = Extraction.read(small_run / STAGED / folder / "extraction.json")
    assert len(extraction.modules) == extraction.summary.linears == linears
    assert extraction.summary.layers == layers
    config = json.loads((small_run / STAGED / folder / "adapter_config.json").read_text())
    assert len(config["target_modules"]) == linears


# --- the card's usage ---------------------------------------------------------------------------------------


def code_blocks(card: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", card.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(("block", "pair"), [(0, "clef"), (1, "clef-flash")], ids=["/", "clef-flash/"])
def test_the_usage_code_of_the_card_gives_the_sources_logits_within_bf16_noise(
    own_small_run: Path, block: int, pair: str
) -> None:
    (own_small_run / "demo" / "clef-lora").symlink_to((own_small_run / STAGED).resolve())
    blocks = code_blocks(STAGED / "README.md")
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(blocks[block], names)  # noqa: S102 - the very code a reader would run
    assert names["model"].dtype == torch.bfloat16
    ids = torch.arange(3, 67).reshape(2, -1)
    ours = logits(names["model"], ids)
    theirs, exact = (logits(source(pair, dtype), ids) for dtype in (torch.bfloat16, torch.float32))
    noise = (theirs - exact).norm()
    assert (ours - exact).norm() < 1.1 * noise, "as near to the source in float32 as the source in bf16 is"
    assert (ours - theirs).norm() < 1.5 * noise
    with names["model"].disable_adapter():
        assert (logits(names["model"], ids) - exact).norm() > 4 * noise


def source(pair: str, dtype: torch.dtype) -> Any:
    return transformers.Qwen3_5ForConditionalGeneration.from_pretrained(f"demo/{pair}", dtype=dtype).eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits.float()
    return found


# --- an interrupted run, and a new one ----------------------------------------------------------------------


@dataclass(frozen=True)
class Interrupted:
    """A run of the command from nothing that was interrupted, and the same command again."""

    folder: Path
    code: int
    errors: str
    again: Answer


@pytest.fixture(scope="module")
def interrupted(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Ctrl-C while the second variant is extracted; then once more to the end."""
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "demo").symlink_to(small_run / "demo")
    arguments = ["--manifest", str(small_run / "demo.yaml"), "--dry-run", "--device", "cpu"]
    command = [sys.executable, "-m", "publisher", *arguments]
    with subprocess.Popen(
        command, cwd=folder, env=_environment({}), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = list(_until(process.stderr, "extracting model.language_model.layers.0."))
        process.send_signal(signal.SIGINT)
        errors = "".join([*lines, process.stderr.read()])
    return Interrupted(folder, process.returncode, errors, publish(*arguments, folder=folder))


def _until(stream: Iterator[str], start: str) -> Iterator[str]:
    for line in stream:
        yield line
        if line.startswith(start):
            return


@pytest.mark.long
def test_ctrl_c_exits_with_130_and_says_how_to_go_on(interrupted: Interrupted) -> None:
    assert interrupted.code == 130
    assert interrupted.errors.endswith("the same command goes on from there\n")
    assert "Traceback" not in interrupted.errors


@pytest.mark.long
def test_the_same_command_finishes_the_job_with_the_same_bytes_as_an_undisturbed_run(
    interrupted: Interrupted, small_run: Path
) -> None:
    assert interrupted.again.returncode == 0, interrupted.again.stderr
    assert content(interrupted.folder / STAGED) == content(small_run / STAGED)


def test_what_was_finished_before_the_interruption_is_reused(interrupted: Interrupted) -> None:
    assert "Clef in small: reused extract, validate, loaders, verify\n" in interrupted.again.stdout
    assert "Clef-flash in small: reused" not in interrupted.again.stdout


def test_results_go_to_stdout_and_progress_to_stderr(interrupted: Interrupted) -> None:
    assert "fetching" not in interrupted.again.stdout
    assert "rendering the card\nplanning the commit\n" in interrupted.again.stderr
    assert "card written: dist/demo/README.md" in interrupted.again.stdout
    assert "commit to demo/clef-lora, compared with nothing" in interrupted.again.stdout


# --- what is reused -----------------------------------------------------------------------------------------


def test_a_second_run_reuses_every_stage_and_changes_no_byte(own_small_run: Path) -> None:
    before = content(own_small_run / STAGED)
    outcome = rerun()
    assert [(variant.path, variant.reused) for variant in outcome.variants] == [("/", ALL), ("clef-flash/", ALL)]
    assert outcome.card_changed is False
    assert content(own_small_run / STAGED) == before


def reused(outcome: Outcome) -> dict[str, tuple[str, ...]]:
    return {variant.path: variant.reused for variant in outcome.variants}


def modules() -> dict[str, int]:
    """Finished modules of the second variant, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in WORK.glob("clef-flash/modules-*/*.safetensors")}


def test_a_new_label_is_written_without_any_arithmetic() -> None:
    before = modules()
    edit_manifest("label: Clef-flash in small", "label: Clef-flash, the small one")
    assert reused(rerun(last="card")) == {"/": ALL, "clef-flash/": ()}
    assert modules() == before
    assert Extraction.read(STAGED / "clef-flash/extraction.json").label == "Clef-flash, the small one"


def test_another_title_makes_the_card_alone_anew() -> None:
    edit_manifest("title: clef-lora (demo)", "title: another")
    outcome = rerun()
    assert reused(outcome) == {"/": ALL, "clef-flash/": ALL}
    assert outcome.card_changed is True
    assert "# another\n" in (STAGED / "README.md").read_text()
    assert (STAGED / "manifest.yaml").read_bytes() == MANIFEST.read_bytes()


def first_extracted() -> str:
    """The first module that a run extracts anew; the run ends there."""
    told: list[str] = []

    def listen(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        told.append(what)
        if what.startswith("extracting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Run(MANIFEST, Path("dist"), device="cpu", dry_run=True), listen)
    return told[-1]


FIRST_OF_FLASH = "extracting model.language_model.layers.0.linear_attn.in_proj_a.weight"


def test_another_rank_makes_that_variants_modules_anew() -> None:
    text = MANIFEST.read_text()
    place = text.rindex("rank: auto")
    MANIFEST.write_text(text[:place] + "rank: 4" + text[place + len("rank: auto") :])
    assert first_extracted() == FIRST_OF_FLASH
    assert modules() == {}


def test_another_source_file_makes_that_variants_modules_anew() -> None:
    source = Path("demo/clef-flash")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    source.unlink()
    source.mkdir()
    for name, octets in files.items():
        (source / name).write_bytes(octets)
    (source / "config.json").write_bytes(files["config.json"] + b"\n")
    assert first_extracted() == FIRST_OF_FLASH
    assert modules() == {}


def test_a_staged_file_that_was_altered_is_made_again() -> None:
    before = content(STAGED)
    (STAGED / "clef-flash/adapter_model.safetensors").write_bytes(b"altered")
    (STAGED / "adapter_config.json").unlink()
    outcome = rerun()
    assert reused(outcome) == dict.fromkeys(("/", "clef-flash/"), ("validate", "loaders", "verify"))
    assert content(STAGED) == before


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["lost", "damaged"])
def test_a_lost_or_damaged_marker_makes_its_stage_run_again(damage: Any) -> None:
    damage(WORK / "clef-flash/validate.json")
    assert reused(rerun(last="validate")) == {"/": BOTH, "clef-flash/": ("extract",)}


def test_what_no_longer_meets_the_expectation_fails_and_keeps_the_earlier_release() -> None:
    before = content(STAGED)
    edit_manifest("linears: 31\n      layers: 0-3", "linears: 30\n      layers: 0-3")
    with pytest.raises(ExtractionError, match=r"differ in linears 31. Expected linears 30"):
        rerun()
    assert content(STAGED) == before


# --- parts of the job ---------------------------------------------------------------------------------------


def test_one_variant_alone_can_be_worked_on() -> None:
    assert reused(rerun(variants=("clef-flash",), last="validate")) == {"clef-flash/": BOTH}


def test_a_variant_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ManifestError, match=r"no variant at flash/. Expected one of /, clef-flash/"):
        rerun(variants=("flash/",))


def test_until_stops_after_that_stage() -> None:
    (STAGED / "README.md").unlink()
    outcome = rerun(last="validate")
    assert outcome.stages == ("fetch", "extract", "validate")
    assert (outcome.card_changed, outcome.plan) == (None, None)
    assert not (STAGED / "README.md").exists()


def test_from_the_card_on_no_checkpoint_is_needed() -> None:
    for pair in Path("demo").iterdir():
        pair.unlink()
    (STAGED / "README.md").unlink()
    outcome = rerun(first="card")
    assert outcome.stages == ("card", "sign", "push", "read_back")
    assert outcome.card_changed is True
    assert outcome.plan is not None


def test_the_stage_named_by_from_runs_again_even_if_nothing_changed() -> None:
    outcome = rerun(first="validate", last="validate", variants=("clef-flash/",))
    assert reused(outcome) == {"clef-flash/": ()}


def test_from_validate_without_an_extraction_says_so() -> None:
    (STAGED / "clef-flash/extraction.json").unlink()
    with pytest.raises(FetchError, match=r"clef-flash/extraction.json does not exist"):
        rerun(first="validate", variants=("clef-flash/",))


def test_a_foreign_file_in_the_staged_tree_is_named_and_left_alone() -> None:
    foreign = STAGED / "clef-flash/notes.txt"
    foreign.write_text("mine")
    with pytest.raises(PushError, match=r"holds clef-flash/notes.txt, which is no part of this release"):
        rerun()
    assert foreign.read_text() == "mine"


def test_what_a_killed_run_had_half_written_is_cleared_away() -> None:
    (STAGED / ".adapter_model.safetensors.12345.partial").write_bytes(b"half")
    before = {name: octets for name, octets in content(STAGED).items() if not name.endswith(".partial")}
    rerun()
    assert content(STAGED) == before


# --- the command line ---------------------------------------------------------------------------------------


def test_json_makes_stdout_one_document() -> None:
    answer = publish("--manifest", "demo.yaml", "--dry-run", "--json")
    assert answer.returncode == 0, answer.stderr
    outcome = Outcome.model_validate_json(answer.stdout)
    assert reused(outcome) == {"/": ALL, "clef-flash/": ALL}
    assert outcome.plan is not None
    assert [operation.path for operation in outcome.plan.operations] == sorted(content(STAGED))


def test_a_stage_that_fails_exits_with_1_and_one_paragraph() -> None:
    Path("demo/clef").unlink()
    answer = publish("--manifest", "demo.yaml", "--dry-run")
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.startswith("error: there is no checkpoint folder demo/clef. Expected ")
    assert answer.stderr.count("\n") == 1


def test_an_error_with_json_is_one_document_too() -> None:
    Path("demo/clef").unlink()
    answer = publish("--manifest", "demo.yaml", "--dry-run", "--json")
    assert answer.returncode == 1
    error = json.loads(answer.stdout)["error"]
    assert (error["kind"], error["found"]) == ("FetchError", "there is no checkpoint folder demo/clef")
    assert error["next"].startswith("correct the path")


def test_verbose_adds_the_traceback() -> None:
    Path("demo/clef").unlink()
    quiet, loud = (publish("--manifest", "demo.yaml", "--dry-run", *more).stderr for more in ((), ("-v",)))
    assert loud.startswith("Traceback")
    assert loud.endswith(quiet)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--manifest", "none.yaml", "--dry-run"], "none.yaml: no such file"),
        (
            ["--manifest", "demo.yaml", "--from", "card", "--until", "extract"],
            "the first stage, card, comes after",
        ),
        (["--manifest", "demo.yaml", "--from", "verify-all"], "'verify-all' is not one of"),
        (["--manifest", "demo.yaml", "--dry-run", "--device", "quantum"], "--device quantum cannot be used here"),
        (["--manifest", "demo.yaml", "--dry-run", "--variant", "x"], "no variant at x/"),
        (["unknown"], "No such command"),
    ],
)
def test_a_wrong_manifest_or_command_exits_with_2(arguments: Sequence[str], words: str) -> None:
    answer = publish(*arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert words in answer.stderr
    assert "Traceback" not in answer.stderr


def test_card_check_passes_on_a_fresh_card() -> None:
    answer = publish("card", "--manifest", "demo.yaml", "--check")
    assert (answer.returncode, answer.stdout) == (0, "card is fresh: dist/demo/README.md\n")


def test_card_check_shows_a_stale_cards_diff_and_exits_with_1() -> None:
    card = STAGED / "README.md"
    stale = card.read_text().replace("31 linears", "32 linears")
    card.write_text(stale)
    answer = publish("card", "--manifest", "demo.yaml", "--check")
    assert answer.returncode == 1
    assert [line for line in answer.stdout.splitlines() if line.startswith("-|")] == [
        line.replace("+|", "-|").replace("31 linears", "32 linears")
        for line in answer.stdout.splitlines()
        if line.startswith("+|")
    ]
    assert answer.stderr.endswith("error: dist/demo/README.md is stale. Next: publish card --manifest demo.yaml.\n")
    assert card.read_text() == stale, "a check writes nothing"
    assert publish("card", "--manifest", "demo.yaml").returncode == 0
    assert "31 linears" in card.read_text()


# --- the real manifest, far from the Hub --------------------------------------------------------------------


def test_the_real_manifest_is_clean() -> None:
    answer = publish("check", "manifests/clef.yaml", folder=ROOT)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "manifests/clef.yaml: ok\n", "")


def test_without_a_hub_one_sentence_says_so_and_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]  # bound and not listening: nobody answers
        user = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "hf")}
        manifest = ROOT / "manifests/clef.yaml"
        answer = publish_as(f"publish --manifest {manifest} --dry-run", folder=tmp_path, environment=os.environ | user)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr == (
        "fetching Cloudflare/clef@ed3eed33\n"
        f"error: the Hub at http://127.0.0.1:{port} cannot be reached (ConnectError). Next: check the connection and "
        "HF_ENDPOINT, or give local checkpoint folders as path: in the manifest.\n"
    )


# --- what is imported ---------------------------------------------------------------------------------------

_IMPORTS = """
import json, sys
from publisher.cli.app import main
sys.argv = ["publish", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def imported(*arguments: str) -> set[str]:
    """Top-level modules loaded by the end of a command that must succeed."""
    command = [sys.executable, "-c", _IMPORTS, *arguments]
    answer = subprocess.run(command, env=_environment({}), capture_output=True, text=True, timeout=300, check=True)
    result = json.loads(answer.stdout.splitlines()[-1])
    assert result["code"] == 0, answer.stderr
    return set(result["modules"])


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["check", *map(str, sorted((ROOT / "manifests").glob("*.yaml")))]],
    ids=["help", "check"],
)
def test_help_and_check_start_without_torch(arguments: list[str]) -> None:
    assert imported(*arguments) & {"torch", "transformers", "peft", "huggingface_hub"} == set()


def test_the_card_starts_without_torch() -> None:
    assert imported("card", "--manifest", "demo.yaml") & {"torch", "transformers", "peft"} == set()
