"""The demo's own decision module answers, alone as in company, and sees its images."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch
from publisher.records.progress import silent
from publisher.verification.models import _with_weights_of
from publisher.verification.request_files import Request, read_request_file

NAME = "demo_decision_module"


@pytest.fixture(scope="module")
def module(demo_pairs: Path) -> Iterator[ModuleType]:
    """The module as it lies in the source repository; nothing is cached beside it."""
    spec = importlib.util.spec_from_file_location(NAME, demo_pairs / "clef-flash" / "joint_schema_model.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, NAME, found)
        spec.loader.exec_module(found)
        yield found


@pytest.fixture(scope="module")
def release(module: ModuleType, demo_pairs: Path) -> tuple[Any, Any]:
    """The released model and its processor."""
    loaded: tuple[Any, Any] = module.load_release_model(demo_pairs / "clef-flash", device="cpu")
    return loaded


def requests(demo_pairs: Path, name: str) -> tuple[Request, ...]:
    return read_request_file(demo_pairs / "requests" / f"{name}.jsonl", name=name, runner="decision").requests


def answers(module: ModuleType, release: tuple[Any, Any], *bodies: dict[str, Any]) -> list[list[Tensor]]:
    model, processor = release
    records = [module.encode_record(processor.tokenizer, body, processor=processor) for body in bodies]
    with torch.inference_mode():
        found: list[list[Tensor]] = model(module.collate_records(records, processor.tokenizer.pad_token_id, "cpu"))
    return found


def body(request: Request) -> dict[str, Any]:
    return {**request.body, "images": request.images()}


def test_all_three_types_are_answered_alone_nearly_as_in_company(
    module: ModuleType, release: tuple[Any, Any], demo_pairs: Path
) -> None:
    bodies = [body(request) for request in requests(demo_pairs, "clef-flash")[:3]]
    together = answers(module, release, *bodies)
    assert [[len(logits) for logits in row] for row in together] == [[2, 6, 4]] * 3
    for one, row in zip(bodies, together, strict=True):
        for alone, beside in zip(answers(module, release, one)[0], row, strict=True):
            torch.testing.assert_close(alone, beside, rtol=0, atol=0.05)


def test_another_image_gives_another_answer(module: ModuleType, release: tuple[Any, Any], demo_pairs: Path) -> None:
    first, _, third, *_ = (body(request) for request in requests(demo_pairs, "images"))
    other = first | {"images": third["images"]}
    assert first["images"] != third["images"]
    mine, theirs = (answers(module, release, one)[0][0] for one in (first, other))
    assert not torch.equal(mine, theirs)


def test_the_base_decides_otherwise(
    module: ModuleType, release: tuple[Any, Any], demo_pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(demo_pairs)
    source, base = (
        fetch(Reference(path=name), memo=tmp_path / "memo.json", progress=silent)
        for name in ("clef-flash", "clef-flash-base")
    )
    (tmp_path / "mixed").mkdir()
    mixed = module.load_release_model(_with_weights_of(base, tuned=source, work=tmp_path / "mixed"), device="cpu")
    one = body(requests(demo_pairs, "clef-flash")[0])
    theirs, ours = (answers(module, loaded, one)[0][1] for loaded in (release, mixed))
    assert (theirs - ours).abs().max() > 0.05


def test_a_response_has_rounded_probabilities_for_every_question(
    module: ModuleType, release: tuple[Any, Any], demo_pairs: Path
) -> None:
    found = module.systemone(*release, {**requests(demo_pairs, "clef-flash")[0].body, "model": "clef"})
    noul, choice, score = found["answers"].values()
    assert (found["model"], found["usage"]["output_tokens"]) == ("clef", 0)
    assert noul == {"type": "noul", "noul": round(noul["noul"], 4)}
    assert list(choice["probabilities"]) == sorted(choice["probabilities"])
    assert choice["probabilities"][choice["choice"]] == choice["confidence"]
    assert sum(score["probabilities"].values()) == pytest.approx(1, abs=4e-4)
    assert 0 <= score["score"] <= 3


def test_a_request_longer_than_allowed_is_refused(module: ModuleType, release: tuple[Any, Any]) -> None:
    asked = {"state": "a boat", "questions": {"q": {"type": "noul"}}}
    with pytest.raises(ValueError, match="more than 5"):
        module.encode_record(release[1].tokenizer, asked, max_length=5)
