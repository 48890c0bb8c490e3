"""The demo's checkpoints are what the rest of the tests take them for."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForImageTextToText

from publisher.cli.demo.checkpoints import PAIRS, RANK, STAMP, VALUE_HEADS, Pair, make_demo, planted_update
from publisher.errors import PublisherError
from tests.commands import publish

Weights = dict[str, Tensor]


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: pair.name)
def pair(request: pytest.FixtureRequest) -> Pair:
    """Each of the two pairs in turn."""
    chosen: Pair = request.param
    return chosen


@pytest.fixture(scope="module")
def base(pair: Pair, demo_pairs: Path) -> Weights:
    """Every tensor of the pair's base."""
    return _weights(demo_pairs / pair.base)


@pytest.fixture(scope="module")
def source(pair: Pair, demo_pairs: Path) -> Weights:
    """Every tensor of the pair's fine-tune."""
    return _weights(demo_pairs / pair.name)


def _weights(folder: Path) -> Weights:
    weights = {}
    for file in _shards(folder):
        with safe_open(file, framework="pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            weights.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118 - a handle, no dict
    return weights


def _shards(folder: Path) -> list[Path]:
    """Those that the index names: the head is none of them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return [folder / name for name in sorted(set(index["weight_map"].values()))]


def _changed(base: Weights, source: Weights) -> list[str]:
    return sorted(name for name, tensor in source.items() if not _same_bytes(tensor, base[name]))


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def _layers(names: list[str]) -> list[int]:
    matches = [re.search(r"language_model\.layers\.(\d+)\.", name) for name in names]
    return sorted({int(match[1]) for match in matches if match})


def _delta(base: Weights, source: Weights, name: str) -> Tensor:
    return source[name].float() - base[name].float()


# --- what is planted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "linears", "layers"), [("clef", 186, range(40, 64)), ("clef-flash", 248, range(32))], ids=str
)
def test_only_the_linears_of_the_adapted_layers_differ(
    demo_pairs: Path, name: str, linears: int, layers: range
) -> None:
    changed = _changed(_weights(demo_pairs / f"{name}-base"), _weights(demo_pairs / name))
    assert len(changed) == linears
    assert _layers(changed) == list(layers)
    assert all(re.search(r"proj(_qkv|_z|_a|_b)?\.weight$", tensor) for tensor in changed)


def test_layers_follow_the_real_pattern_of_three_linear_and_one_full_attention(pair: Pair, base: Weights) -> None:
    attention = _layers([name for name in base if ".self_attn." in name])
    delta_net = _layers([name for name in base if ".linear_attn." in name])
    assert attention == list(range(3, pair.layers, 4))
    assert sorted(attention + delta_net) == list(range(pair.layers))


def test_only_the_base_holds_the_multi_token_prediction_block(base: Weights, source: Weights) -> None:
    extra = base.keys() - source.keys()
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= extra
    assert all(name.startswith("mtp.") for name in extra)
    assert source.keys() <= base.keys()


def test_rank_16_is_visible_wherever_a_linear_is_wider_than_that(base: Weights, source: Weights) -> None:
    wide = [name for name in _changed(base, source) if min(base[name].shape) > RANK]
    assert all(min(base[name].shape) >= 4 * RANK for name in wide)
    spectra = {name: torch.linalg.svdvals(_delta(base, source, name)) for name in wide}
    assert [name for name, sigma in spectra.items() if sigma[RANK - 1] <= 2 * sigma[RANK]] == []


def test_the_narrow_projections_carry_an_update_of_full_width(pair: Pair, base: Weights, source: Weights) -> None:
    narrow = [name for name in _changed(base, source) if min(base[name].shape) < RANK]
    assert {name.split(".")[-2] for name in narrow} == {"in_proj_a", "in_proj_b"}
    for name in narrow:
        delta = _delta(base, source, name)
        noise = delta - planted_update(pair.name, name, shape=tuple(delta.shape))
        assert delta.shape[0] == VALUE_HEADS
        assert torch.linalg.svdvals(delta)[-1] > 2 * torch.linalg.svdvals(noise)[0]


def test_the_release_is_one_rounding_of_base_plus_update(pair: Pair, base: Weights, source: Weights) -> None:
    for name in _changed(base, source):
        update = planted_update(pair.name, name, shape=tuple(base[name].shape))
        assert torch.equal((base[name].float() + update).bfloat16(), source[name])


def test_rounding_costs_half_a_percent_to_four_and_swallows_little(pair: Pair, base: Weights, source: Weights) -> None:
    for name in _changed(base, source):
        delta = _delta(base, source, name)
        update = planted_update(pair.name, name, shape=tuple(delta.shape))
        assert 0.005 < (delta - update).norm() / update.norm() < 0.04, name
        assert (delta == 0).float().mean() < 0.05, name


# --- what transformers makes of it --------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for pair in PAIRS for name in (pair.base, pair.name)])
def test_each_checkpoint_is_sharded_bf16_and_its_index_names_every_tensor(demo_pairs: Path, name: str) -> None:
    folder = demo_pairs / name
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    config = json.loads((folder / "config.json").read_text())
    weights = _weights(folder)
    assert weight_map.keys() == weights.keys()
    assert len(set(weight_map.values())) >= 2
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_transformers_loads_both_without_complaint_and_their_answers_differ(
    pair: Pair, demo_pairs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transformers_log = logging.getLogger("transformers")
    transformers_log.addHandler(caplog.handler)  # transformers does not propagate to the root logger
    try:
        models = [_load(demo_pairs / name) for name in (pair.base, pair.name)]
    finally:
        transformers_log.removeHandler(caplog.handler)
    assert caplog.messages == []
    prompt = torch.arange(0, 500, 25).reshape(1, -1)
    with torch.no_grad():
        base, source = (model(input_ids=prompt).logits.float() for model in models)
    assert torch.isfinite(base).all()
    assert torch.isfinite(source).all()
    assert (base - source).std() > 0.1 * source.std()


def _load(folder: Path) -> torch.nn.Module:
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "Qwen3_5ForConditionalGeneration"
    loaded: torch.nn.Module = model
    return loaded


# --- the folder ---------------------------------------------------------------------------------------------


def test_a_second_making_gives_the_same_bytes_with_another_number_of_threads(demo_pairs: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        make_demo(tmp_path / "demo")
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "demo" / STAMP).read_bytes() == (demo_pairs / STAMP).read_bytes()


def test_making_it_prints_nothing_and_takes_an_empty_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo").mkdir()
    make_demo(tmp_path / "demo")
    assert capfd.readouterr() == ("", "")
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_finished_demo_is_left_as_it_is(demo_pairs: Path) -> None:
    said: list[str] = []
    before = (demo_pairs / STAMP).stat()
    make_demo(demo_pairs, progress=said.append)
    assert (demo_pairs / STAMP).stat() == before
    assert said == [f"{demo_pairs} is complete and up to date"]


def _lose_a_shard(folder: Path) -> None:
    _shards(folder / "clef")[0].unlink()


def _damage_a_config(folder: Path) -> None:
    (folder / "clef-flash" / "config.json").write_text("{}")


def _age(folder: Path) -> None:
    stamp = json.loads((folder / STAMP).read_text())
    stamp["recipe"]["seed"] += 1
    (folder / STAMP).write_text(json.dumps(stamp))


@pytest.mark.parametrize("spoil", [_lose_a_shard, _damage_a_config, _age])
def test_a_half_made_damaged_or_outdated_demo_is_made_anew(
    demo_pairs: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    folder = tmp_path / "demo"
    shutil.copytree(demo_pairs, folder)
    spoil(folder)
    make_demo(folder)
    assert (folder / STAMP).read_bytes() == (demo_pairs / STAMP).read_bytes()
    assert _weights(folder / "clef").keys() == _weights(demo_pairs / "clef").keys()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_an_interrupted_making_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(text: str) -> None:
        if "flash" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_demo(tmp_path / "demo", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_that_name_which_is_not_ours_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(PublisherError, match=r"was not made by the demo.*move it away"):
        make_demo(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_file_of_that_name_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("a file")
    with pytest.raises(PublisherError, match="was not made by the demo"):
        make_demo(tmp_path / "demo")
    assert (tmp_path / "demo").read_text() == "a file"


def test_an_outdated_demo_that_holds_a_file_of_someone_else_is_refused_by_that_file(tmp_path: Path) -> None:
    stamp = {"made_by": "publisher.cli.demo.checkpoints", "recipe": {}, "files": {}}
    (tmp_path / STAMP).write_text(json.dumps(stamp))
    (tmp_path / "notes.md").write_text("mine")
    with pytest.raises(PublisherError, match=r"notes\.md was not made by the demo"):
        make_demo(tmp_path)
    assert (tmp_path / "notes.md").read_text() == "mine"


@pytest.mark.long
def test_the_demo_ends_with_the_table_that_the_readme_shows(tmp_path: Path) -> None:
    done = publish("demo", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("variant              linears")[2].partition("\n\n")[0].splitlines()[1:]
    printed = [line.split() for line in done.stdout.splitlines()]
    assert len(table) == 2
    for line in table:
        assert line.split() in printed
