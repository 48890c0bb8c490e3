"""What can be repaired in an adapter of others without guessing, and what cannot: each on one that PEFT wrote."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file, save_file

from publisher.adapters.loading import quiet
from publisher.cli.app import cli
from publisher.errors import FetchError, ValidationError
from publisher.loaders.repairs import REPAIRS, numbers
from tests.loaders.conftest import Made, Make
from tests.loaders.written import WRITTEN

PREFIX = "base_model.model."
Break = Callable[[Made], object]


def repaired(made: Made) -> Result:
    out = made.folder.parent / "out"
    return CliRunner().invoke(cli, ["compat", str(made.folder), "--base", str(made.base), "--repair", str(out)])


def changes(made: Made, done: Result) -> list[str]:
    assert done.exit_code in {0, 1}, done.output
    lines = done.stdout.split("\n")
    assert (made.folder.parent / "out").is_dir(), done.exception
    return [line for line in lines if line.startswith("repaired: ")]


def logits(base: Path, adapter: Path | None) -> torch.Tensor:
    """What the base answers, with this adapter loaded by PEFT."""
    architecture = json.loads((base / "config.json").read_text())["architectures"][0]
    with quiet(), warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        model = getattr(transformers, architecture).from_pretrained(base, dtype=torch.float32).eval()
        model = PeftModel.from_pretrained(model, adapter).eval() if adapter else model
        found: torch.Tensor = model(input_ids=torch.tensor([[3, 5, 7, 11, 13, 17, 19]])).logits
    return found


def renamed(recipe: Callable[[str], str]) -> Break:
    return lambda made: made.rename(recipe)


def said(**fields: Any) -> Break:
    return lambda made: made.change(**fields)


def with_keys(made: Made) -> Made:
    """Ranks and alphas by keys that hold PEFT's prefix and a tensor's ending, which PEFT does not match."""
    module = "model.layers.1.self_attn.q_proj"
    for half, extent in (("A", 0), ("B", 1)):
        cut(made, f"{PREFIX}{module}.lora_{half}.weight", extent)
    key = f"{PREFIX}{module}.weight"
    return made.change(rank_pattern={key: 2}, alpha_pattern={key: 2})


def cut(made: Made, key: str, extent: int) -> None:
    file = made.folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[key] = tensors[key].narrow(extent, 0, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def without(*parts: str) -> Break:
    return lambda made: made.rename(lambda key: None if any(part in key for part in parts) else key)


DEFECTS: dict[str, tuple[Break, str]] = {
    "no prefix": (renamed(lambda key: key.removeprefix(PREFIX)), "begin as PEFT's do"),
    "half the prefix": (renamed(lambda key: key.replace(PREFIX, "base_model.")), "begin as PEFT's do"),
    "the prefix twice": (renamed(lambda key: PREFIX + key), "begin as PEFT's do"),
    "the prefix of a compiled model": (renamed(lambda key: key.replace(PREFIX, "_orig_mod.")), "begin as PEFT's do"),
    "names of the model without its head": (
        renamed(lambda key: key.replace(f"{PREFIX}model.", PREFIX)),
        "begin as PEFT's do",
    ),
    "the adapter's name": (
        renamed(lambda key: key.replace(".weight", ".default.weight")),
        "without the adapter's own",
    ),
    "another adapter's name": (renamed(lambda key: key.replace(".weight", ".sft.weight")), "without the adapter's own"),
    "no .weight": (renamed(lambda key: key.removesuffix(".weight")), "end as PEFT's do"),
    "all of these": (
        renamed(lambda key: key.removeprefix(PREFIX).replace(".weight", ".default")),
        "without the adapter's own",
    ),
    "text for numbers": (said(r="4", lora_alpha="4.0"), "no whole ones, in r, lora_alpha"),
    "a rank of 4.0": (said(r=4.0), "no whole ones, in r"),
    "more target_modules": (
        without("layers.1.mlp.up_proj"),
        "1 module without factors in the file taken out of target_modules",
    ),
    "fewer target_modules": (said(target_modules=["q_proj", "v_proj"]), "of the file added to target_modules"),
    "layers left out": (said(layers_to_transform=[0, 1]), "of the file added to target_modules"),
    "keys with a prefix": (with_keys, "keys of rank_pattern and alpha_pattern are names of modules"),
}


@pytest.mark.parametrize(("break_it", "told"), DEFECTS.values(), ids=DEFECTS)
def test_what_has_one_meaning_is_repaired_and_computes_what_was_meant(make: Make, break_it: Break, told: str) -> None:
    made = make()
    meant = made.folder.parent / "meant"
    shutil.copytree(made.folder, meant)
    break_it(made)
    if break_it is with_keys:  # what is meant has other sizes than before
        shutil.rmtree(meant)
        shutil.copytree(made.folder, meant)
        plain = {"model.layers.1.self_attn.q_proj": 2}
        Made(meant, made.base).change(rank_pattern=plain, alpha_pattern=plain)
    if told.startswith("1 module without"):  # the module is lost, and everything else as it was
        Made(meant, made.base).rename(lambda key: None if "layers.1.mlp.up_proj" in key else key)
    try:
        before = {one.loads for loader, one in made.judged().items() if loader != "MLX"}
    except (FetchError, ValidationError):
        before = {"no"}
    assert before != {"yes"}  # PEFT alone reads some of these
    done = repaired(made)
    assert any(told in line for line in changes(made, done)), done.stdout
    out = made.folder.parent / "out"
    assert Made(out, made.base).judged()["PEFT"].loads == "yes"
    assert torch.equal(logits(made.base, out), logits(made.base, meant))
    assert not torch.equal(logits(made.base, out), logits(made.base, None))


def test_a_repair_keeps_every_other_file_and_follows_no_link(make: Make) -> None:
    made = make().rename(lambda key: key.removeprefix(PREFIX))
    (made.folder / "tokenizer.json").write_text("{}")
    (made.folder / "secret").symlink_to("/etc/hostname")
    before = {file.name: file.read_bytes() for file in made.folder.iterdir() if file.is_file()}
    repaired(made)
    after = {file.name: file.read_bytes() for file in (made.folder.parent / "out").iterdir()}
    assert after.keys() == before.keys() - {"secret"}
    assert after["tokenizer.json"] == before["tokenizer.json"]
    assert {file.name: file.read_bytes() for file in made.folder.iterdir() if file.is_file()} == before


# --- experts --------------------------------------------------------------------------------------------------

EXPERT_DEFECTS: dict[str, tuple[Break, str]] = {
    "nested in the other order": (
        renamed(
            lambda key: (
                key.replace(".experts.base_layer.", ".experts.")
                if ".base_layer." in key
                else key.replace(".experts.", ".experts.base_layer.")
            )
        ),
        "parameters nest as in PEFT",
    ),
    "dropout": (said(lora_dropout=0.05), "lora_dropout is 0"),
    "fan_in_fan_out": (said(fan_in_fan_out=True), "fan_in_fan_out is false"),
    "no prefix": (renamed(lambda key: key.removeprefix(PREFIX)), "begin as PEFT's do"),
}


@pytest.mark.parametrize("kind", ["experts", "experts stored transposed"])
@pytest.mark.parametrize(("break_it", "told"), EXPERT_DEFECTS.values(), ids=EXPERT_DEFECTS)
def test_factors_of_experts_are_repaired_too(tmp_path: Path, kind: str, break_it: Break, told: str) -> None:
    WRITTEN[kind].write(tmp_path)
    made = Made(tmp_path / "adapter", tmp_path / "base")
    meant = tmp_path / "meant"
    shutil.copytree(made.folder, meant)
    break_it(made)
    done = repaired(made)
    assert any(told in line for line in changes(made, done)), done.stdout
    assert torch.equal(logits(made.base, tmp_path / "out"), logits(made.base, meant))


@pytest.mark.parametrize("name", ["nested in the other order", "dropout"])
def test_before_that_peft_refuses_them(tmp_path: Path, name: str) -> None:
    WRITTEN["experts"].write(tmp_path)
    made = Made(tmp_path / "adapter", tmp_path / "base")
    EXPERT_DEFECTS[name][0](made)
    assert made.judged()["PEFT"].loads == "no"


# --- what is left alone ---------------------------------------------------------------------------------------


def doubled(made: Made) -> None:
    file = made.folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors |= {key.replace(".weight", ".default.weight"): tensor.clone() for key, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


UNCERTAIN: dict[str, Break] = {
    "another rank": said(r=8),
    "names of another class": renamed(lambda key: key.replace(".self_attn.", ".attention.")),
    "each factor twice": doubled,
    "one factor missing": without("layers.1.mlp.up_proj.lora_A"),
    "layers that the base lacks": renamed(lambda key: key.replace("layers.3.", "layers.9.")),
    "an initialisation that cannot be run again": said(init_lora_weights="corda"),
}


@pytest.mark.parametrize("break_it", UNCERTAIN.values(), ids=UNCERTAIN)
def test_what_can_mean_several_things_is_refused_in_one_error_and_nothing_is_written(
    make: Make, break_it: Break
) -> None:
    made = make()
    break_it(made)
    assert made.judged()["PEFT"].loads != "yes"
    refused = repaired(made).exception
    assert isinstance(refused, ValidationError)
    assert "without guessing" in str(refused)
    assert "Next: " in str(refused)
    assert {path.name for path in made.folder.parent.iterdir()} == {"adapter", "LlamaForCausalLM"}


def test_a_sound_adapter_is_left_alone(make: Make) -> None:
    refused = repaired(make()).exception
    assert isinstance(refused, ValidationError)
    assert "there is nothing to repair in" in str(refused)


@pytest.mark.parametrize("name", [name for name, one in WRITTEN.items() if one.trained])
def test_no_adapter_that_peft_loads_as_it_is_meant_is_changed(name: str, tmp_path: Path) -> None:
    WRITTEN[name].write(tmp_path)
    made = Made(tmp_path / "adapter", tmp_path / "base")
    if made.judged()["PEFT"].loads != "yes":
        return
    refused = repaired(made).exception
    assert isinstance(refused, ValidationError), name
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_names_no_base_is_told_so(make: Make) -> None:
    made = make().rename(lambda key: key.removeprefix(PREFIX)).change(base_model_name_or_path=None)
    assert "\nnot repaired: adapter_config.json names no base" in repaired(made).stdout


def test_the_page_has_a_row_for_every_repair() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compat.md").read_text(encoding="utf-8")
    table = page.partition("\n## Repair\n")[2].partition("\n## ")[0]
    rows = [row for row in table.split("\n") if row.startswith("| ")]
    assert len(rows) == 1 + len((numbers, *REPAIRS)) + 1  # the heading, and the packing


@pytest.mark.parametrize(
    "fields",
    [
        {"r": "9" * 400},
        {"r": {"a": 1}},
        {"rank_pattern": {"a": {"b": [1]}}},
        {"rank_pattern": [1]},
        {"target_modules": {"a": 1}},
        {"target_modules": "(?!x)(((x+)+)+)+!"},
        {"lora_alpha": "1e400"},
        {"peft_type": "IA3"},
        {"fan_in_fan_out": "yes"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_hostile_fields_end_in_one_error(make: Make, fields: dict[str, Any]) -> None:
    made = make().rename(lambda key: key.removeprefix(PREFIX)).change(**fields)
    refused = repaired(made)
    assert isinstance(refused.exception, ValidationError | FetchError), refused.output
    assert not (made.folder.parent / "out").exists()
