"""Fetch, on real safetensors files: what is recorded of a whole checkpoint, and what a broken one is told.

The broken checkpoints are made by the recipes below. What a user reads of each stands in tests/checkpoints_bad.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from publisher.checkpoints.headers import read_headers
from publisher.checkpoints.reading import TensorReader
from publisher.errors import FetchError
from publisher.manifest.schema import Reference
from publisher.pipeline.stages.fetch import fetch, hashed_here
from publisher.records.checkpoint import Snapshot
from publisher.records.files import sha256_of
from publisher.records.progress import silent

MESSAGES = Path(__file__).parents[1] / "checkpoints_bad"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
Tensors = Mapping[str, torch.Tensor]


def tensors() -> dict[str, torch.Tensor]:
    return {f"layers.{i}.weight": torch.full((4, 3), float(i), dtype=torch.bfloat16) for i in range(4)}


def single(folder: Path, content: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(dict(content), folder / "model.safetensors")
    return folder


def sharded(folder: Path, content: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    places = {name: SHARDS[index % 2] for index, name in enumerate(content)}
    for shard in SHARDS:
        save_file({name: content[name] for name in content if places[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder the manifest's paths start from: messages then name no folder of this machine."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fetched(name: str, *, told: list[str] | None = None) -> Snapshot:
    def tell(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        if told is not None:
            told.append(what)

    return fetch(Reference(path=name), memo=Path("memo.json"), progress=tell)


# --- whole checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "files"),
    [(single, ("config.json", "model.safetensors")), (sharded, ("config.json", *SHARDS, INDEX))],
    ids=["single", "sharded"],
)
def test_every_file_of_a_checkpoint_is_recorded_with_its_digest(
    make: Callable[[Path, Tensors], Path], files: tuple[str, ...]
) -> None:
    folder = make(Path("model"), tensors())
    (folder / "tokenizer.json").write_text("no part of an adapter")
    snapshot = fetched("model")
    assert snapshot.folder == folder
    assert tuple(file.name for file in snapshot.checkpoint.files) == files
    for file in snapshot.checkpoint.files:
        assert (file.size, file.sha256) == ((folder / file.name).stat().st_size, sha256_of(folder / file.name))


@pytest.mark.parametrize("make", [single, sharded])
def test_the_same_tensors_are_read_from_one_file_and_from_shards(make: Callable[[Path, Tensors], Path]) -> None:
    headers = read_headers(make(Path("model"), tensors()))
    assert list(headers) == sorted(tensors())
    with TensorReader(headers) as reader:
        for name, tensor in tensors().items():
            assert (headers[name].dtype, headers[name].shape) == ("BF16", (4, 3))
            assert torch.equal(reader.read(name), tensor)


def test_a_local_checkpoint_is_identified_by_its_content_and_not_by_its_place() -> None:
    single(Path("one"), tensors())
    Path("elsewhere").mkdir()
    single(Path("elsewhere/one"), tensors())
    one, other = fetched("one").checkpoint, fetched("elsewhere/one").checkpoint
    assert one == other
    assert (one.kind, one.name) == ("local", "one")
    assert len(one.revision) == 64


def test_a_symbolic_link_is_named_after_the_folder_it_leads_to() -> None:
    single(Path("model"), tensors())
    Path("link").symlink_to("model")
    assert fetched("link").checkpoint == fetched("model").checkpoint


# --- the memo of digests ------------------------------------------------------------------------------------


def hashed(name: str) -> list[str]:
    told: list[str] = []
    fetched(name, told=told)
    return [line for line in told if line.startswith("hashing")]


def test_an_unchanged_file_is_hashed_once() -> None:
    single(Path("model"), tensors())
    assert hashed("model") == ["hashing model/config.json", "hashing model/model.safetensors"]
    assert hashed("model") == []


def test_a_changed_file_is_hashed_again_and_gives_another_revision() -> None:
    single(Path("model"), tensors())
    before = fetched("model").checkpoint
    file = Path("model/model.safetensors")
    state = file.stat()
    save_file({name: tensor + 1 for name, tensor in tensors().items()}, file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert file.stat().st_size == state.st_size
    assert hashed("model") == ["hashing model/model.safetensors"]
    assert fetched("model").checkpoint.revision != before.revision


@pytest.mark.parametrize("damage", ["", "{", '{"known": {"x": 1}}', '{"other": {}}'])
def test_a_damaged_memo_is_ignored_and_replaced(damage: str) -> None:
    single(Path("model"), tensors())
    before = fetched("model")
    Path("memo.json").write_text(damage)
    assert len(hashed("model")) == 2
    assert hashed("model") == []
    assert fetched("model") == before


def test_a_file_written_over_with_its_old_size_and_time_is_hashed_again() -> None:
    single(Path("model"), tensors())
    before = fetched("model").checkpoint
    file = Path("model/model.safetensors")
    state = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (state.st_size, state.st_mtime_ns)
    assert hashed("model") == ["hashing model/model.safetensors"]
    assert fetched("model").checkpoint.revision != before.revision


def test_whoever_reads_tensors_goes_by_no_digest_of_an_earlier_run_and_hashes_each_file_once() -> None:
    single(Path("model"), tensors())
    fetched("model")
    told: list[str] = []
    own = set[Path]()

    def tell(what: str, done: int = 0, total: int = 0) -> None:
        del done, total
        told.append(what)

    found = fetch(Reference(path="model"), memo=Path("memo.json"), progress=tell, hashed=own)
    assert told == []
    for _ in range(2):
        assert hashed_here(found, memo=Path("memo.json"), progress=tell, hashed=own) == found
        assert told == ["hashing model/config.json", "hashing model/model.safetensors"]


# --- broken checkpoints -------------------------------------------------------------------------------------

BROKEN: dict[str, Callable[[Path], None]] = {}


def broken(recipe: Callable[[Path], None]) -> Callable[[Path], None]:
    """Name a recipe that makes a broken checkpoint in the given folder, which does not exist yet."""
    BROKEN[recipe.__name__] = recipe
    return recipe


@broken
def no_folder(folder: Path) -> None:
    assert not folder.exists()


@broken
def a_file_instead_of_a_folder(folder: Path) -> None:
    folder.write_text("")


@broken
def no_config(folder: Path) -> None:
    (single(folder, tensors()) / "config.json").unlink()


@broken
def config_is_not_json(folder: Path) -> None:
    (single(folder, tensors()) / "config.json").write_text("{'model_type': 'llama'}")


@broken
def config_is_a_list(folder: Path) -> None:
    (single(folder, tensors()) / "config.json").write_text("[]")


@broken
def no_weights(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").unlink()


@broken
def pickled_weights_only(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").rename(folder / "pytorch_model.bin")


@broken
def gguf_only(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").rename(folder / "model-Q4_K_M.gguf")


@broken
def adapter_only(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").rename(folder / "adapter_model.safetensors")


@broken
def zero_bytes(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").write_bytes(b"")


@broken
def no_tensors(folder: Path) -> None:
    single(folder, {})


@broken
def header_is_not_json(folder: Path) -> None:
    (single(folder, tensors()) / "model.safetensors").write_bytes((16).to_bytes(8, "little") + b"x" * 16)


@broken
def a_git_lfs_pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"
    (single(folder, tensors()) / "model.safetensors").write_text(text)


@broken
def shard_cut_short(folder: Path) -> None:
    shard = sharded(folder, tensors()) / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:-10])


@broken
def shard_missing(folder: Path) -> None:
    (sharded(folder, tensors()) / SHARDS[1]).unlink()


@broken
def tensor_in_no_shard(folder: Path) -> None:
    index = sharded(folder, tensors()) / INDEX
    content = json.loads(index.read_text())
    content["weight_map"] |= {"layers.9.weight": SHARDS[0], "norm.weight": SHARDS[1]}
    index.write_text(json.dumps(content))


@broken
def index_is_not_json(folder: Path) -> None:
    index = sharded(folder, tensors()) / INDEX
    index.write_text(index.read_text()[:-20])


@broken
def index_without_a_weight_map(folder: Path) -> None:
    (sharded(folder, tensors()) / INDEX).write_text('{"metadata": {}}')


@broken
def index_with_an_empty_weight_map(folder: Path) -> None:
    (sharded(folder, tensors()) / INDEX).write_text('{"weight_map": {}}')


@broken
def shard_outside_the_folder(folder: Path) -> None:
    index = sharded(folder, tensors()) / INDEX
    save_file(tensors(), folder.parent / "x.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors(), "../x.safetensors")}))


@pytest.mark.parametrize("recipe", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_checkpoint_is_refused_in_these_words(
    recipe: Callable[[Path], None], golden: Callable[[Path, str], None]
) -> None:
    recipe(Path("broken"))
    with pytest.raises(FetchError) as raised:
        fetch(Reference(path="broken"), memo=Path("memo.json"), progress=silent)
    golden(MESSAGES / f"{recipe.__name__}.txt", _without_the_library(f"error: {raised.value}\n"))
    assert not Path("memo.json").exists(), "a broken checkpoint is found before anything is hashed"


def _without_the_library(text: str) -> str:
    """Safetensors' own words differ from version to version."""
    return re.sub(r"(whole safetensors file: )[^.]*[hH]eader[^.]*", r"\1(what safetensors says)", text)


def test_every_message_on_file_has_a_recipe() -> None:
    assert {path.stem for path in MESSAGES.glob("*.txt")} == BROKEN.keys()
