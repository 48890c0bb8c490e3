"""How the factors of stacked experts are packed is told by the numbers, and what is packed otherwise is repaired."""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from publisher.adapters.loading import quiet
from publisher.checkpoints.files import read_config
from publisher.cli.app import cli
from publisher.errors import FetchError, ManifestError, ValidationError
from publisher.loaders import judge
from publisher.loaders.subject import Base, class_for, read_subject
from publisher.numerics.packing import PACKINGS, PEFT, Packing, by_expert, factor_figures, told_by_factors
from publisher.records.loaders import LoaderVerdict
from tests.experts import save_as_class, small_experts, update_experts
from tests.inputs.pairs import Pair

STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS, RANK, STEPS = 4, 4, 15
UNSLOTH = Packing("expert", "expert")
CLASSES = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM")


@dataclass
class Adapted:
    """A base, a PEFT adapter for its experts, and the base with that adapter merged into it."""

    folder: Path
    model_class: str

    @property
    def base(self) -> Path:
        """The base's folder."""
        return self.folder / "base"

    @property
    def adapter(self) -> Path:
        """The adapter's folder."""
        return self.folder / "adapter"

    @property
    def source(self) -> Path:
        """The merged fine-tune's folder."""
        return self.folder / "source"

    def pack(self, packing: Packing, *, rank: int = RANK) -> "Adapted":
        """Write the adapter's factors, which PEFT has packed, in this packing."""
        file = self.adapter / "adapter_model.safetensors"
        tensors = {}
        for key, tensor in load_file(file).items():
            if ".experts." not in key:
                tensors[key] = tensor
            elif ".lora_A." in key:
                tensors[key] = regrouped(tensor, PEFT.a, packing.a, experts=len(tensor) // rank)
            else:
                tensors[key] = regrouped(tensor.T, PEFT.b, packing.b, experts=tensor.shape[1] // rank).T.contiguous()
        save_file(tensors, file, metadata={"format": "pt"})
        return self

    def say(self, **fields: Any) -> "Adapted":
        """Set fields of adapter_config.json."""
        file = self.adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return self

    def judged(self, *, source: Path | None = None) -> dict[str, LoaderVerdict]:
        """The verdicts by loader."""
        base = Base(self.base, class_for({}, read_config(self.base)))
        return {one.loader: one for one in judge(read_subject(self.adapter, base, source=source))}

    def loaded(self, adapter: Path | None = None) -> Any:
        """The base, with this adapter merged into it by PEFT where one is named."""
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = getattr(transformers, self.model_class).from_pretrained(self.base, dtype=torch.float32).eval()
            return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload() if adapter else model


def regrouped(vectors: torch.Tensor, before: Any, after: Any, *, experts: int) -> torch.Tensor:
    own = by_expert(vectors, experts=experts, grouping=before)
    return (own if after == "expert" else own.transpose(0, 1)).flatten(0, 1).contiguous()


def logits(model: Any) -> torch.Tensor:
    ids = torch.randint(96, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = model.float()(input_ids=ids).logits
    return found


def compat(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["compat", *map(str, arguments)])


Make = Callable[..., Adapted]


@pytest.fixture
def adapted(tmp_path: Path) -> Make:
    """`adapted(model_class)`: a small base whose experts PEFT has trained for some steps; or given random factors."""

    def make(model_class: str = "Qwen3MoeForCausalLM", *, trained: bool = True, rank: int = RANK) -> Adapted:
        made = Adapted(tmp_path, model_class)
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = small_experts(model_class, dtype=torch.float32)
            save_as_class(model, made.base)
            torch.manual_seed(5)
            settings = peft.LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules=[], target_parameters=STACKED, init_lora_weights=trained
            )
            model = peft.get_peft_model(model, settings)
            if trained:
                _train(model)
            model.peft_config["default"].base_model_name_or_path = "o/base"
            model.save_pretrained(made.adapter)
            save_as_class(model.merge_and_unload(), made.source)
        return made

    return make


def _train(model: Any) -> None:
    """Train as people do, by AdamW on a few texts."""
    steps = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    ids = torch.randint(96, (4, 32))
    for _ in range(STEPS):
        steps.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        steps.step()


# --- what the factors tell ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("packing", PACKINGS, ids="-".join)
def test_the_factors_of_a_training_tell_their_packing(adapted: Make, model_class: str, packing: Packing) -> None:
    found = adapted(model_class).pack(packing).judged()
    if packing == PEFT:
        assert found["PEFT"].loads == found["transformers"].loads == "yes"
        assert any("packed as PEFT reads them" in note for note in found["PEFT"].notes)
    else:
        for loader in ("PEFT", "transformers"):
            assert found[loader].loads == "wrongly"
            assert [one.kind for one in found[loader].findings] == ["other packing"]


def test_random_factors_tell_nothing(adapted: Make) -> None:
    for packing in (PEFT, UNSLOTH):
        found = adapted(trained=False).pack(packing).judged()["PEFT"]
        assert found.loads == "yes"
        assert any("cannot be told: B A stands" in note for note in found.notes)


def test_of_many_files_of_random_factors_none_is_told() -> None:
    draw = torch.Generator().manual_seed(3)
    for experts, rank in 20 * [(4, 4), (8, 2), (16, 8)]:
        factors = [[torch.randn(experts * rank, width, generator=draw) for width in (32, 48)] for _ in range(EXPERTS)]
        figures = [factor_figures(a, b, experts=experts, generator=draw) for a, b in factors]
        assert told_by_factors(figures).packing is None


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 0.0])
def test_factors_that_are_no_numbers_or_zero_tell_nothing(adapted: Make, spoilt: float) -> None:
    made = adapted()
    file = made.adapter / "adapter_model.safetensors"
    tensors = {key: tensor.fill_(spoilt) if "lora_B" in key else tensor for key, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert all("packed as PEFT" not in note for note in made.judged()["PEFT"].notes)


def test_at_rank_1_there_is_no_order_to_tell(adapted: Make) -> None:
    found = adapted(rank=1).judged()["PEFT"]
    assert (found.loads, found.notes) == ("yes", ())


# --- what the fine-tune tells ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", CLASSES)
@pytest.mark.parametrize("packing", PACKINGS, ids="-".join)
def test_the_fine_tune_tells_the_packing_of_random_factors(adapted: Make, model_class: str, packing: Packing) -> None:
    made = adapted(model_class, trained=False).pack(packing)
    found = made.judged(source=made.source)["PEFT"]
    assert found.loads == ("yes" if packing == PEFT else "wrongly")
    told = [*found.notes, *(one.what for one in found.findings)]
    assert any("B A leaves 0.0% of the fine-tune's update over" in line for line in told)


def test_a_fine_tune_that_is_not_the_adapters_tells_nothing(adapted: Make) -> None:
    made = adapted().pack(UNSLOTH)
    other = small_experts(made.model_class, dtype=torch.float32)
    update_experts(other, ranks=(3, 1, 2, 5))
    save_as_class(other, made.folder / "other")
    found = made.judged(source=made.folder / "other")["PEFT"]
    assert found.loads == "yes"
    assert any("cannot be told: B A leaves" in note for note in found.notes)


def test_a_fine_tune_without_the_parameters_is_named(adapted: Make) -> None:
    made = adapted()
    file = made.source / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("gate_up_proj")}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(FetchError, match=r"source has no model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        made.judged(source=made.source)


# --- what adapter_config.json states ---------------------------------------------------------------------------


def test_what_the_file_states_counts_where_the_factors_tell_nothing(adapted: Make) -> None:
    made = adapted(trained=False).pack(UNSLOTH)
    (found,) = made.say(lora_B_layout="grouped_by_expert").judged()["PEFT"].findings
    assert "as adapter_config.json states (lora_B_layout: grouped_by_expert)" in found.what
    assert made.say(lora_B_layout="rank_major").judged()["PEFT"].loads == "yes"
    assert made.say(lora_B_layout=["?"]).judged()["PEFT"].loads == "yes"


def test_what_the_file_states_against_its_factors_tells_nothing(adapted: Make) -> None:
    found = adapted().say(lora_B_layout="grouped_by_expert").judged()["PEFT"]
    assert found.loads == "yes"
    assert any("the factors speak against it" in note for note in found.notes)


# --- the repair -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", CLASSES)
def test_what_unsloth_has_packed_is_repaired_and_merged_gives_the_fine_tune(adapted: Make, model_class: str) -> None:
    made = adapted(model_class)
    sound = load_file(made.adapter / "adapter_model.safetensors")
    made.pack(UNSLOTH).say(lora_B_layout="grouped_by_expert")
    (made.adapter / "README.md").write_text("kept")
    (made.adapter / "tokens").mkdir()
    (made.adapter / "tokens" / "added.json").write_text("{}")
    broken = logits(made.loaded(made.adapter))
    out = made.folder / "out" / "repaired"
    done = compat(made.adapter, "--base", made.base, "--repair", out)
    assert "repaired: the factors of 4 parameters packed as PEFT reads them" in done.stdout.replace("\n", " ")
    assert {path.name for path in out.rglob("*") if path.is_file()} == {
        "README.md",
        "added.json",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    again = load_file(out / "adapter_model.safetensors")
    assert again.keys() == sound.keys()
    assert all(torch.equal(again[key], sound[key]) for key in sound)
    assert json.loads((out / "adapter_config.json").read_text())["lora_B_layout"] == "rank_major"
    base, source, merged = (logits(model) for model in (made.loaded(), _source(made), made.loaded(out)))
    assert float((merged - source).norm()) < 1e-4 * float((base - source).norm())
    assert float((broken - source).norm()) > 0.3 * float((base - source).norm())


def _source(made: Adapted) -> Any:
    with quiet():
        return getattr(transformers, made.model_class).from_pretrained(made.source, dtype=torch.float32).eval()


def test_random_factors_are_repaired_by_the_fine_tune_and_refused_without_it(adapted: Make) -> None:
    made = adapted(trained=False)
    sound = load_file(made.adapter / "adapter_model.safetensors")
    made.pack(Packing("rank", "expert"))
    out = made.folder / "out"
    refused = compat(made.adapter, "--base", made.base, "--repair", out).exception
    assert isinstance(refused, ValidationError)
    assert "how the factors of its experts are packed cannot be told" in str(refused)
    assert str(refused).endswith("Next: name the folder of the merged fine-tune with --source.")
    assert not out.exists()
    done = compat(made.adapter, "--base", made.base, "--source", made.source, "--repair", out, "--json")
    document = json.loads(done.stdout)
    assert document["folder"] == str(out)
    assert [line.split(";")[0] for line in document["changes"]] == [
        "the factors of 4 parameters packed as PEFT reads them"
    ]
    assert {one["loader"]: one["loads"] for one in document["verdicts"]}["PEFT"] == "yes"
    again = load_file(out / "adapter_model.safetensors")
    assert all(torch.equal(again[key], sound[key]) for key in sound)


def test_what_peft_has_packed_is_left_alone(adapted: Make) -> None:
    made = adapted()
    refused = compat(made.adapter, "--base", made.base, "--source", made.source, "--repair", made.folder / "out")
    assert isinstance(refused.exception, ValidationError)
    assert "there is nothing to repair" in str(refused.exception)
    assert not (made.folder / "out").exists()


@pytest.mark.parametrize("method", ["svd", "exact"])
def test_the_factors_of_a_decomposition_are_told_and_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = Pair(tmp_path, "Qwen3MoeForCausalLM")
    with quiet():
        model = small_experts(pair.model_class)
        save_as_class(model, pair.base)
        update_experts(model)
        save_as_class(model, pair.source)
    pair.extracted(**({} if method == "svd" else {"method": method, "rank": 5}))
    sound = load_file(pair.staged / "adapter_model.safetensors")
    shutil.copytree(pair.staged, tmp_path / "adapter")
    (tmp_path / "adapter" / "extraction.json").unlink()
    made = Adapted(tmp_path, pair.model_class)
    assert made.judged()["PEFT"].loads == "yes"
    made.pack(UNSLOTH, rank=5)
    assert made.judged(source=pair.source)["PEFT"].loads == "wrongly"
    compat(made.adapter, "--base", made.base, "--source", pair.source, "--repair", tmp_path / "out")
    again = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert all(torch.equal(again[key], sound[key]) for key in sound)
    if method == "svd":
        assert any("by their right angles" in one.what for one in made.judged()["PEFT"].findings)


def test_a_command_line_that_cannot_be_meant_is_refused(adapted: Make) -> None:
    made = adapted()
    (made.folder / "taken").mkdir()
    (made.folder / "taken" / "file").touch()
    for arguments, complaint in (
        ((made.adapter, "--source", made.source), "--source is for the adapter in a folder"),
        (("-m", "m.yaml", "--base", made.base, "--source", made.source), "--source is for the adapter in a folder"),
        ((made.adapter, "--base", made.base, "--source", "no/where"), "there is no folder no/where"),
        (("-m", "m.yaml", "--repair", "out"), "--repair is for the adapter in a folder"),
        ((made.adapter, "--base", made.base, "--repair", made.folder / "taken"), "what it holds is not touched"),
        ((made.adapter, "--base", made.base, "--repair", made.adapter / "out"), "lies in the adapter's own folder"),
    ):
        refused = compat(*arguments).exception
        assert isinstance(refused, ManifestError), arguments
        assert complaint in str(refused)
    (made.adapter / "extraction.json").write_text("{}")
    refused = compat(made.adapter, "--base", made.base, "--repair", made.folder / "out").exception
    assert isinstance(refused, ManifestError)
    assert "extraction.json" in str(refused)


# --- hostile adapters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 10**6},
        {"r": 10**12},
        {"r": 3},
        {"rank_pattern": {"experts.gate_up_proj": 999_983}},
        {"target_parameters": [f"mlp.experts.p{number}" for number in range(2000)]},
        {"target_parameters": ["gate_up_proj"]},
        {"target_parameters": "gate_up_proj"},
        {"target_parameters": [7]},
        {"target_parameters": ["(a+)+!.(a+)+"]},
    ],
    ids=str,
)
def test_a_hostile_configuration_ends_in_a_verdict_or_one_error(adapted: Make, fields: dict[str, Any]) -> None:
    made = adapted().pack(UNSLOTH).say(**fields)
    for more in ((), ("--repair", made.folder / "out")):
        found = compat(made.adapter, "--base", made.base, *more)
        assert isinstance(found.exception, SystemExit | ValidationError | FetchError | None)


def test_a_base_of_more_experts_than_the_file_has_is_told_before_any_work(adapted: Make) -> None:
    made = adapted().pack(UNSLOTH)
    config = made.base / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_local_experts": 99_999, "num_experts": 99_999}))
    assert made.judged()["PEFT"].loads == "no"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_local_experts": 10**9, "num_experts": 10**9}))
    with pytest.raises(ValidationError):
        made.judged()
