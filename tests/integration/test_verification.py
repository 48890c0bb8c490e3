"""A verification of a small Llama with the logits runner: figures, bounds, reuse, and runs that are killed."""

import gc
import io
import json
import random
import re
import shutil
import time
from dataclasses import replace
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from publisher.cli.console import show_outcome
from publisher.cli.demo.fp8 import write_fp8
from publisher.engines.local import Local
from publisher.errors import PublisherError, PushError, VerificationError
from publisher.manifest.reading import load_manifest
from publisher.numerics.randomness import seeded
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.fetch import fetch
from publisher.pipeline.stages.verify import Inputs, verify
from publisher.records.extraction import Extraction
from publisher.records.files import sha256_of
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from publisher.records.verification import Verification
from publisher.verification.models import Model, loaded
from publisher.verification.request_files import RequestFile, read_request_file
from tests.forks import forks
from tests.manifests import one_variant
from tests.words import write_tokenizer

pytestmark = pytest.mark.usefixtures("quick_read_back")

ROOT = Path(__file__).parents[2]
STAGED, WORK = Path("dist/pico"), Path("dist/pico.work/root")
FILE, TEXTS = "requests/texts.jsonl", 30
BOUNDS = {"max_answers_changed": 0.2, "max_kl": 0.01}
FEW, MANY = 2, 6


def manifest(**verification: Any) -> str:
    asked = {"runner": "logits", "batch": 4, "sets": [{"name": "Texts", "file": FILE, **BOUNDS}]} | verification
    card = {"title": "Pico", "summary": "One adapter."}
    return one_variant("o/pico", label="Pico", source="pairs/one", base="pairs/base", card=card, verification=asked)


def texts(count: int = TEXTS) -> str:
    words = random.Random(1)  # noqa: S311 - texts, not secrets
    lines = (
        {"id": f"t{i}", "text": " ".join(f"w{words.randrange(60)}" for _ in range(3 + i % 7))} for i in range(count)
    )
    return "".join(json.dumps(line) + "\n" for line in lines)


def publish(**options: Any) -> Outcome:
    return run(Run(Path("pico.yaml"), Path("dist"), device="cpu", **{"last": "card", **options}), silent)


@pytest.fixture(scope="module")
def finished(pico_pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pair, a tokenizer in its source, requests, and a run to the card. Read it, copy it."""
    folder = tmp_path_factory.mktemp("verified")
    shutil.copytree(pico_pairs, folder / "pairs")
    write_tokenizer(folder / "pairs/one")
    (folder / "requests").mkdir()
    (folder / FILE).write_text(texts())
    (folder / "pico.yaml").write_text(manifest())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        publish()
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to change, in the working folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def reused(outcome: Outcome) -> tuple[str, ...]:
    (variant,) = outcome.variants
    return variant.reused


# --- figures ------------------------------------------------------------------------------------------------


def test_base_and_adapter_answer_nearly_as_the_release_does_and_the_card_says_so(finished: Path) -> None:
    found = Verification.read(finished / STAGED / "verification.json")
    (texts_,) = found.sets
    assert (texts_.requests, texts_.questions, texts_.failed) == (TEXTS, TEXTS, 0)
    assert 0 < texts_.max_kl < BOUNDS["max_kl"]
    assert texts_.file is not None
    assert texts_.file.sha256 == sha256_of(finished / FILE)
    assert "| Texts |" in (finished / STAGED / "README.md").read_text()


@pytest.mark.usefixtures("place")
def test_the_command_shows_the_table_of_the_test_sets() -> None:
    console = Console(file=io.StringIO())
    show_outcome(publish(), console)
    assert isinstance(console.file, io.StringIO)
    assert re.search(rf"Pico +Texts +{TEXTS} +{TEXTS} +[\d.]+% \(\d+\)", console.file.getvalue())


def adapter_with(change: str, folder: Path) -> Path:
    """The staged adapter with the factors of some modules scaled: `nothing` is left of them, or `tenfold`."""
    shutil.copytree(STAGED, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:
        if ".lora_B." in name and (change == "nothing" or "layers.1.mlp.down_proj" in name):
            tensors[name] *= 0 if change == "nothing" else 10
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def verified(adapter: Path, *, base: str) -> Verification:
    (variant,) = load_manifest(Path("pico.yaml")).variants
    source, plain = (
        fetch(one, memo=Path("memo.json"), progress=silent)
        for one in (variant.source, variant.base.model_copy(update={"path": f"pairs/{base}"}))
    )
    files = [read_request_file(Path(FILE), name=FILE, runner="logits")]
    return verify(
        variant,
        Extraction.read(STAGED / "extraction.json"),
        inputs=Inputs(base=plain, tuned=source, request_files=files),
        staged=adapter,
        work=Path("work"),
        engine=Local(torch.device("cpu")),
        progress=silent,
    )


def test_identical_models_differ_by_exactly_nothing(place: Path) -> None:
    (texts_,) = verified(adapter_with("nothing", place / "none"), base="one").sets
    assert (texts_.answers_changed, texts_.max_kl, texts_.mean_kl, texts_.max_probability_difference) == (0, 0, 0, 0)


@pytest.mark.parametrize(("change", "base"), [("tenfold", "base"), ("nothing", "base"), ("whole", "two")])
def test_a_damaged_adapter_or_another_base_fails_by_set_and_bound_and_stages_nothing(
    place: Path, change: str, base: str
) -> None:
    adapter = adapter_with(change, place / "changed") if change != "whole" else STAGED
    if change == "whole":
        tensors = {n: seeded_like(t, n) for n, t in load_file("pairs/base/model.safetensors").items()}
        save_file(tensors, "pairs/two/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(VerificationError, match=r"Texts: [\d.e-]+ is above max_(answers_changed 0.2|kl 0.01)"):
        verified(adapter, base=base)
    assert not (adapter / "verification.json").exists()
    assert Verification.read(Path("work/failed-verification.json")).sets[0].broken()


def seeded_like(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=seeded(name, torch.device("cpu"))).to(tensor.dtype)


def asked(model: Model, texts_: RequestFile) -> int:
    """How many language models are in memory while this one answers."""
    (variant,) = load_manifest(Path("pico.yaml")).variants
    assert variant.verification is not None
    with loaded(model, variant.verification, device=torch.device("cpu")) as ask:
        ask(texts_.requests[:2])
        return sum(type(one) is LlamaForCausalLM for one in gc.get_objects())


@pytest.mark.usefixtures("place")
def test_one_model_is_in_memory_at_a_time() -> None:
    (variant,) = load_manifest(Path("pico.yaml")).variants
    source, base = (fetch(one, memo=Path("memo.json"), progress=silent) for one in (variant.source, variant.base))
    texts_ = read_request_file(Path(FILE), name=FILE, runner="logits")
    gc.disable()  # left to itself it would sometimes be in time
    try:
        plain = Model(label="released", model_class=variant.model_class, tuned=source)
        released = asked(plain, texts_)
        adapted = asked(replace(plain, label="adapted", base=base, adapter=STAGED), texts_)
    finally:
        gc.enable()
    assert (released, adapted) == (1, 1)


def test_what_a_model_cannot_be_asked_is_counted_with_its_reason(place: Path) -> None:
    lines = texts(3) + json.dumps({"id": "odd", "text": "w1", "images": ["dot.png"]}) + "\n"
    dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
    (place / FILE).write_text(lines.replace("dot.png", f"data:image/png;base64,{dot}"))
    publish()
    (texts_,) = Verification.read(STAGED / "verification.json").sets
    assert (texts_.requests, texts_.questions, texts_.failed) == (4, 3, 1)
    assert {failure.side for failure in texts_.failures} == {"reference", "candidate"}


ROWS = {"sets": [{"name": "Rows", "file": "rows.jsonl"}]}
LACKS_MODULE = ROWS | {"runner": "decision", "trust_remote_code": True, "module": "no.py"}
FAILS = LACKS_MODULE | {"module": "fails.py"}
LACKS_FILE = {"runner": "logits", "sets": [{"name": "T", "file": "no.jsonl"}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fp8": {"path": "pairs/none"}}, "there is no checkpoint folder pairs/none"),
        ({"verification": LACKS_MODULE}, "pairs/one has no no.py"),
        ({"verification": FAILS}, "fails.py of the source cannot be imported: ModuleNotFoundError: .*not_installed"),
        (
            {"verification": {"runner": "logits", "sets": [{"name": "T", "file": "no.jsonl"}]}},
            "no request file no.jsonl",
        ),
    ],
)
def test_what_a_verification_lacks_is_said_before_anything_is_extracted(
    place: Path, fields: dict[str, Any], words: str
) -> None:
    (place / "rows.jsonl").write_text('{"state": "w1", "questions": {"n": {"type": "noul"}}}\n')
    (place / "pairs/one/fails.py").write_text("import not_installed")
    (place / "pico.yaml").write_text(with_variant(**fields))
    shutil.rmtree("dist")
    with pytest.raises(PublisherError, match=words):
        publish()
    assert not list(Path("dist").rglob("*.safetensors"))


@pytest.mark.usefixtures("place")
def test_a_verification_the_manifest_asks_for_no_more_leaves_the_staged_tree() -> None:
    text = with_variant()
    data = yaml.safe_load(text)
    del data["variants"][0]["verification"]
    Path("pico.yaml").write_text(yaml.safe_dump(data))
    publish()
    assert not (STAGED / "verification.json").exists()
    assert "No verification was run" in (STAGED / "README.md").read_text()


# --- the FP8 base, and the decision runner ------------------------------------------------------------------


def with_variant(**fields: Any) -> str:
    data = yaml.safe_load(Path("pico.yaml").read_text())
    data["variants"][0] |= fields
    return yaml.safe_dump(data)


@pytest.mark.parametrize("against", ["base", "release"])
def test_the_adapter_is_tried_on_the_fp8_base_too(place: Path, against: str) -> None:
    linears = write_fp8(place / "pairs/base", place / "pairs/base-fp8")
    (place / "pico.yaml").write_text(with_variant(fp8={"path": "pairs/base-fp8", "against": against}))
    publish()
    found = Verification.read(STAGED / "verification.json").fp8
    assert found is not None
    assert (found.against, found.linears) == (against, linears)
    assert found.sets[0].max_kl > 0


MODULE = """
import json
from pathlib import Path
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

class Decider(torch.nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
    def forward(self, batch):
        return [[self.backbone(ids).logits[0, -1, :k] for k in sizes] for ids, sizes in batch]

def load_release_model(path, device="cuda", dtype=torch.bfloat16):
    assert Path(path, "tokenizer.json").is_file()
    return Decider(LlamaForCausalLM.from_pretrained(path, dtype=dtype)).to(device), AutoTokenizer.from_pretrained(path)

def encode_record(tokenizer, record):
    if record["state"] == "refused":
        raise ValueError("too long")
    sizes = [1 if one["type"] == "noul" else len(one["criteria"]) for one in record["questions"].values()]
    return tokenizer(json.dumps(record["state"]), return_tensors="pt")["input_ids"], sizes

def collate_records(records, pad_token_id, device):
    return [(ids.to(device), sizes) for ids, sizes in records]
"""


def test_the_decision_runner_asks_the_sources_own_module(place: Path) -> None:
    (place / "pairs/one/joint_schema_model.py").write_text(MODULE)
    questions = {
        "n": {"type": "noul"},
        "c": {"type": "choice", "criteria": {"b": "", "a": "", "d": ""}},
        "s": {"type": "score", "criteria": ["low", "high"]},
    }
    expected = {"n": True, "c": "b", "s": 1}
    rows = [
        {"id": i, "family": "f", "state": f"w{i} w7", "questions": questions, "expected": expected} for i in range(9)
    ]
    rows[3]["state"] = "refused"
    (place / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = {"runner": "decision", "trust_remote_code": True, "sets": [{"name": "Rows", "file": FILE}]}
    (place / "pico.yaml").write_text(with_variant(verification=asked))
    publish()
    (found,) = Verification.read(STAGED / "verification.json").sets
    assert (found.requests, found.questions, found.failed) == (9, 24, 3)
    assert {failure.reason for failure in found.failures} == {"ValueError: too long"}
    assert [kind.kind for kind in found.kinds] == ["choice", "noul", "score"]
    assert found.gold is not None
    assert reused(publish()) == ("extract", "validate", "loaders", "verify")


# --- reuse --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_a_second_run_reuses_the_verification() -> None:
    before = (STAGED / "verification.json").read_bytes()
    assert reused(publish()) == ("extract", "validate", "loaders", "verify")
    assert (STAGED / "verification.json").read_bytes() == before


def answer_files() -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in WORK.glob("answers/*.jsonl")}


def test_another_request_file_is_answered_anew(place: Path) -> None:
    (place / FILE).write_text(texts(5))
    assert reused(publish()) == ("extract", "validate", "loaders")
    assert Verification.read(STAGED / "verification.json").sets[0].requests == 5


def test_another_adapter_is_asked_anew_and_the_released_model_is_not(place: Path) -> None:
    before = answer_files()
    text = (place / "pico.yaml").read_text().replace("dtype: float32", "dtype: bfloat16")
    (place / "pico.yaml").write_text(text)
    assert reused(publish()) == ()
    after = answer_files()
    assert len(before) == 2
    assert len(after) == 3
    assert before.items() <= after.items()


def test_another_bound_needs_no_new_answer_and_is_held_to(place: Path) -> None:
    before = answer_files()
    (place / "pico.yaml").write_text((place / "pico.yaml").read_text().replace("max_kl: 0.01", "max_kl: 1.0e-12"))
    with pytest.raises(VerificationError, match="above max_kl 1e-12"):
        publish()
    assert answer_files() == before
    assert not (STAGED / "verification.json").exists()


def test_nothing_is_pushed_that_did_not_pass_the_verification_the_manifest_asks_for(place: Path) -> None:
    (place / FILE).write_text(texts(5))
    with pytest.raises(PushError, match="has not passed verification as it is now"):
        publish(first="push", last="push", rehearse=True)
    publish(last="read_back", rehearse=True)


# --- killed -------------------------------------------------------------------------------------------------


def begun() -> ForkServerProcess:
    options = Run(Path("pico.yaml"), Path("dist"), device="cpu", first="verify", last="verify")
    process = forks().Process(target=run, args=(options, silent))
    process.start()
    return process


@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_goes_on_from_there_and_ends_with_the_same_bytes(place: Path, kills: int) -> None:
    before = (STAGED / "verification.json").read_bytes()
    answers = {file.name: file.read_bytes() for file in WORK.glob("answers/*.jsonl")}
    moments = random.Random(3)  # noqa: S311 - moments, not secrets
    stopped = set()
    for _ in range(kills):
        shutil.rmtree(WORK / "answers")
        process = begun()
        wanted = moments.randrange(1, sum(map(len, answers.values())))
        while process.is_alive() and sum(f.stat().st_size for f in WORK.glob("answers/*.jsonl")) < wanted:
            time.sleep(0.001)
        process.kill()
        process.join()
        stopped.add(sum(file.stat().st_size for file in WORK.glob("answers/*.jsonl")))
        publish(first="verify", last="verify")
        assert (STAGED / "verification.json").read_bytes() == before
        assert {file.name: file.read_bytes() for file in WORK.glob("answers/*.jsonl")} == answers
    assert len(stopped) > kills / 3, "the kills struck at different moments"
    assert place.is_dir()
