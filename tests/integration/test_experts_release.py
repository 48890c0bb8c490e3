"""A release with experts from end to end: card, report, explanations and audits say the same of them."""

import contextlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
from huggingface_hub import constants

from publisher.adapters.loading import quiet
from publisher.audits import audit
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.read_back import _problems
from publisher.records.audit import Audit
from publisher.records.extraction import Extraction
from publisher.records.files import canonical_json
from publisher.records.progress import silent
from publisher.release.evidence import read_release
from publisher.release.explain import explain
from publisher.release.report import render_report
from tests.experts import RANKS, add_rounded, save_as_transformers, small_experts, update_experts
from tests.manifests import one_variant

MODEL, EVIDENCE, CARD = "Qwen3MoeForCausalLM", Path("dist/moe/extraction.json"), Path("dist/moe/README.md")
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with base and source of Qwen3-MoE, whose experts lie one by one, and what a dry run made of them."""
    folder = tmp_path_factory.mktemp("moe")
    with contextlib.chdir(folder), quiet():
        model = small_experts(MODEL)
        save_as_transformers(model, Path("base"))
        update_experts(model)
        add_rounded(model.model.layers[0].self_attn.q_proj.weight, rank=2)
        add_rounded(model.model.layers[1].mlp.gate.weight, rank=2)
        save_as_transformers(model, Path("source"))
        card = {"title": "Experts", "summary": "One adapter for experts, a router and a linear."}
        text = one_variant("o/moe", label="Moe", source="source", base="base", card=card, model_class=MODEL)
        Path("moe.yaml").write_text(text, encoding="utf-8")
        run(Run(Path("moe.yaml"), Path("dist"), device="cpu", dry_run=True), silent)
    return folder


@pytest.fixture
def own_run(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run to spoil, in the working folder."""
    shutil.copytree(run_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def audited(*, deep: bool = False) -> Audit:
    return audit("dist/moe", deep=deep, work=Path("work"), device="cpu", progress=silent)


def failed(found: Audit) -> set[str]:
    return {check.name for check in found.checks if check.status == "failed"}


def altered(change: Callable[[Any], object]) -> None:
    """Change extraction.json, in the form in which this tool writes it."""
    claims = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    change(claims)
    EVIDENCE.write_text(canonical_json(claims), encoding="utf-8")


@pytest.mark.usefixtures("own_run")
def test_the_card_has_a_table_of_the_experts() -> None:
    text = CARD.read_text(encoding="utf-8")
    assert "1 linear, 4 expert tensors and 1 other weight, all 2 layers" in text
    rows = dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text.partition("### Experts")[2], re.MULTILINE))
    assert rows["Tensors"] == "5"
    assert rows["… of which one matrix alone"] == "1"
    assert rows["Matrices that changed, one for each expert"] == "13 of 17"
    assert rows["Rank of a matrix (least / median / greatest)"] == "1 / 3 / 5"
    assert rows["Elements of the weights that changed"] == "23,168"
    summary = Extraction.read(EVIDENCE).summary.experts
    assert summary is not None
    assert rows["Elements of their factors"] == f"{summary.parameters:,}"
    assert 0.5 < summary.share < 1


@pytest.mark.usefixtures("own_run")
def test_an_audit_passes_and_a_deep_one_too() -> None:
    found = audited(deep=True)
    assert failed(found) == set()
    told = {check.name: check.detail for check in found.checks if check.status == "passed"}
    assert told["extraction"] == "1 modules and 5 parameters extracted again give the same figures"
    assert told["targets"].endswith("; 5 parameters by target_parameters")
    assert told["scale"] == "the ranks are the tensors'; scale 1 in 6 modules"
    assert {"function", "reconstruction", "singular values", "loading"} <= told.keys()


def _of(claims: Any, expert: int) -> Any:
    (tensor,) = (tensor for tensor in claims["experts"] if tensor["name"] == GATE_UP)
    return next(found for found in tensor["experts"] if found["expert"] == expert)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda claims: _of(claims, 0).update(sigma_1=9.0), {"singular values"}),
        (lambda claims: _of(claims, 0).update(ratio=0.1), {"figures"}),
        (lambda claims: claims["summary"]["experts"].update(silent=1), {"figures"}),
        (lambda claims: _of(claims, 3).update(expert=1), {"evidence"}),
        (lambda claims: _of(claims, 3).update(expert=4), {"evidence"}),
    ],
    ids=["singular value", "ratio", "summary", "number of another expert", "number of no expert"],
)
@pytest.mark.usefixtures("own_run")
def test_an_altered_figure_of_one_expert_is_found(change: Callable[[Any], object], expected: set[str]) -> None:
    altered(change)
    assert expected <= failed(audited())


@pytest.mark.usefixtures("own_run")
def test_a_forged_error_of_one_expert_takes_a_deep_audit() -> None:
    altered(lambda claims: _of(claims, 0).update(exact_share=0.999))
    found = audited(deep=True)
    assert {"extraction", "reconstruction"} <= failed(found)
    assert any(f"{GATE_UP}[0]: exact share" in check.detail for check in found.checks)


@pytest.mark.usefixtures("own_run")
def test_a_parameter_and_one_of_its_experts_can_be_explained() -> None:
    evidence = read_release(Path("moe.yaml"), None, staged=Path("dist/moe"))
    (whole,) = explain(GATE_UP, evidence)
    facts = dict(whole.facts)
    assert facts["experts"] == "3 of 4 changed; the figures above are those of all together"
    assert facts["ranks"] == "1 at 5, 1 at 3, 1 at 1"
    (one,) = explain(f"{GATE_UP}[3]", evidence)
    assert (one.figures.rank, one.figures.shape) == (RANKS[3], (80, 32))
    assert f"{GATE_UP}" in render_report(evidence)


@pytest.mark.usefixtures("own_run")
def test_a_stranger_s_load_compares_the_wrappers_with_the_evidence() -> None:
    extraction = Extraction.read(EVIDENCE)
    request: dict[str, Any] = {
        "path": "/",
        "model_class": MODEL,
        "modules": [module.model_dump(mode="json") for module in extraction.modules],
        "experts": [tensor.model_dump(mode="json") for tensor in extraction.experts],
        "config": "base",
        "repo": Path("dist/moe").absolute(),
        "subfolder": "",
        "commit": None,
    }
    assert _problems(request) == []
    first, second, *rest = request["experts"]
    swapped = [first | {"keys": second["keys"]}, second | {"keys": first["keys"]}, *rest]
    assert len(_problems(request | {"experts": swapped})) == 2


@pytest.mark.usefixtures("own_run")
def test_the_card_says_where_factors_save_little_beside_the_weights_themselves() -> None:
    manifest = Path("moe.yaml")
    manifest.write_text(manifest.read_text().replace("rank: auto", "rank: 16"), encoding="utf-8")
    run(Run(manifest, Path("dist"), device="cpu", dry_run=True), silent)
    summary = Extraction.read(EVIDENCE).summary.experts
    assert summary is not None
    assert summary.parameters > summary.weights / 2
    text = CARD.read_text(encoding="utf-8")
    assert "**The Moe adapter saves little here:** its factors of experts have" in text
    assert f"change have {summary.weights:,}." in text


def test_an_adapter_of_peft_s_own_with_the_ends_of_parameters_names_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the documentation of PEFT gives them: `target_parameters=["mlp.experts.gate_up_proj", ...]`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with quiet():
        model = small_experts("GptOssForCausalLM")
        save_as_transformers(model, tmp_path / "base")
        model.name_or_path = str(tmp_path / "base")
        settings = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            task_type="CAUSAL_LM",
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            rank_pattern={"mlp.experts.down_proj": 2},
            alpha_pattern={"mlp.experts.down_proj": 4},
            init_lora_weights=False,
        )
        with warnings.catch_warnings(action="ignore"):  # that keys of parameters match no module
            peft.get_peft_model(model, settings).save_pretrained(tmp_path / "adapter")
    found = audit("adapter", deep=False, work=Path("work"), device="cpu", progress=silent)
    assert failed(found) <= {"card"}  # PEFT writes its card before anybody has said what the model is
    told = {check.name: check.detail for check in found.checks if check.status == "passed"}
    assert told["scale"] == "the ranks are the tensors'; scale 2 in 6 modules"
    assert told["loading"] == "PEFT loads 2 modules and 4 parameters whole on GptOssForCausalLM"
    config = Path("adapter/adapter_config.json")
    config.write_text(config.read_text().replace('"mlp.experts.down_proj": 2', '"mlp.experts.down_proj": 3'))
    found = audit("adapter", deep=False, work=Path("work"), device="cpu", progress=silent)
    assert "loading" in failed(found)  # 8 columns may be two experts at rank 4, for all that the file says
