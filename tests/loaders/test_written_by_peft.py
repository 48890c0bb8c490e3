"""Every kind of adapter that PEFT writes: compat and audit say of PEFT what a load with real weights comes to."""

import json
from pathlib import Path

import pytest

from publisher.adapters.loading import AdapterLocation, load_on_config, quiet
from publisher.audits.adapter import Adapter, adapter_checks
from publisher.audits.evidence import loading
from publisher.checkpoints.files import read_config
from publisher.errors import PublisherError
from publisher.loaders import judge
from publisher.loaders.subject import Base, class_for, read_subject
from publisher.records.loaders import LoaderVerdict
from tests.loaders.written import WRITTEN, Written


def judged(folder: Path) -> dict[str, LoaderVerdict]:
    base = Base(folder / "base", class_for({}, read_config(folder / "base")))
    return {one.loader: one for one in judge(read_subject(folder / "adapter", base))}


def audited(folder: Path) -> tuple[str, list[str]]:
    """What the audit's check of loading comes to, and which other checks fail."""
    adapter = Adapter.read("/", folder / "adapter", variant=None)
    failed = [check.detail for check in adapter_checks(adapter) if check.status == "failed"]
    try:
        with quiet():
            loading(adapter)
    except PublisherError:
        return "failed", failed
    return "passed", failed


@pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)
def test_the_verdicts_are_what_a_load_with_weights_comes_to(written: Written, tmp_path: Path) -> None:
    saved = written.write(tmp_path)
    outcomes = {by: written.outcome(tmp_path, saved, by=by) for by in ("PEFT", "transformers")}
    found = judged(tmp_path)
    assert {by: found[by].loads for by in outcomes} == outcomes, [found[by].findings for by in outcomes]
    checked, failed = audited(tmp_path)
    assert (checked == "passed") == (outcomes["PEFT"] == "yes")
    if outcomes["PEFT"] == "yes":
        assert failed == []


@pytest.mark.parametrize("name", ["pissa", "olora", "lora_ga", "corda"])
def test_loaders_that_add_b_a_to_the_bases_own_weights_take_changed_ones_wrongly(name: str, tmp_path: Path) -> None:
    WRITTEN[name].write(tmp_path)
    found = judged(tmp_path)
    for loader in ("SGLang", "llama.cpp"):
        assert found[loader].loads == "wrongly"
        assert [one.kind for one in found[loader].findings] == ["other base"]
    assert found["vLLM"].loads != "yes"


@pytest.mark.parametrize("name", ["alpha 0", "untrained"])
def test_what_changes_nothing_is_told_so_and_no_scale_is_compared(name: str, tmp_path: Path) -> None:
    WRITTEN[name].write(tmp_path)
    (one,) = judged(tmp_path)["PEFT"].findings
    assert one.what.endswith("so that the adapter changes nothing")


def test_factors_in_float32_keep_their_values_beside_a_base_in_bfloat16(tmp_path: Path) -> None:
    Written().write(tmp_path)
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    adapter = AdapterLocation(tmp_path / "adapter")
    with quiet():
        _, problems = load_on_config("LlamaForCausalLM", config=tmp_path / "base", adapter=adapter)
    assert problems == []
