"""`--stream`: the same bytes without storing the checkpoints, from a local Hub over HTTP, also where it misbehaves."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from huggingface_hub import CommitOperationAdd, HfApi, constants
from safetensors.torch import load_file, save, save_file

from publisher.border.safetensors_header import frame_header
from publisher.checkpoints import remote_headers, streaming
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.cli.app import cli
from publisher.errors import FetchError, HubError, UnclearAnswerError
from publisher.extraction import delta_norms, tensor_bytes
from publisher.hub import client as hub
from publisher.hub import streaming as hub_streaming
from publisher.hub.local import Fault, LocalHub
from publisher.manifest.schema import Reference
from publisher.pipeline.run import Run, run
from publisher.pipeline.stages.fetch import fetch
from publisher.records.checkpoint import Snapshot
from publisher.records.outcome import Outcome
from publisher.records.progress import silent
from tests.inputs.pairs import quantise, say_fp8
from tests.models import add_update, small_llama

TUNED_LAYERS = ("layers.1.", "layers.2.")
LARGEST_PAIR = 2 * 2 * 128 * 256  # bytes of the largest linear, bf16, in source and base
MANIFEST = """\
version: 1
repo: o/stream-lora
license: mit
variants:
  - path: /
    label: Stream in small
    source: {source}
    base: {base}
    model_class: LlamaForCausalLM
    adapter: {{method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}}
card: {{template: lora_card.md.j2, title: Stream, summary: A test.}}
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` and `base`, a Llama of three layers in shards, of which the first layer's are equal."""
    folder = tmp_path_factory.mktemp("pair")
    transformers.logging.disable_progress_bar()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 4}
    model = small_llama(sizes, seed=3)
    model.save_pretrained(folder / "base", max_shard_size="200KB")
    add_update(model, rf"({'|'.join(TUNED_LAYERS)}).*proj$", rank=4, scale=0.02)
    model.save_pretrained(folder / "source", max_shard_size="200KB")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pair: Path) -> Iterator[LocalHub]:
    """A local Hub that holds the pair."""
    folder = tmp_path_factory.mktemp("hub")
    with LocalHub(folder / "data") as running, pytest.MonkeyPatch.context() as patch:
        address = running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "ENDPOINT", running.endpoint)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        patch.setenv("HF_TOKEN", running.token)
        for side in ("source", "base"):
            upload(f"o/{side}", pair / side)
        yield running


@pytest.fixture(autouse=True)
def work_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder and an empty cache; small blocks, so that small tensors arrive as large ones do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(streaming, "_AHEAD", 40_000)
    monkeypatch.setattr(remote_headers, "_known", {})
    monkeypatch.setattr(tensor_bytes, "BLOCK", 5_000)
    monkeypatch.setattr(delta_norms, "BLOCK", 5_000)
    monkeypatch.setattr(hub_streaming, "_FIRST_WAIT", 0.01)


def upload(repo: str, folder: Path) -> str:
    HfApi().create_repo(repo, exist_ok=True)
    return HfApi().upload_folder(repo_id=repo, folder_path=folder).oid


def pinned(repo: str) -> str:
    return f"{{repo: {repo}, revision: {HfApi().model_info(repo).sha}}}"


def published(dist: str, *, source: str = "", base: str = "", last: str = "extract", stream: bool = False) -> Outcome:
    Path("m.yaml").write_text(MANIFEST.format(source=source or pinned("o/source"), base=base or pinned("o/base")))
    return run(Run(Path("m.yaml"), Path(dist), device="cpu", last=last, stream=stream), silent)


def staged(dist: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(dist, "m").iterdir()}


def stored_in(folder: Path) -> int:
    """Bytes of all files; the cache's links count what they lead to once, as its blobs."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and not file.is_symlink())


def snapshot_of(repo: str) -> Snapshot:
    reference = Reference(repo=repo, revision=HfApi().model_info(repo).sha)
    return fetch(reference, memo=Path("digests.json"), progress=silent, stream=True)


# --- what a run gives ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("served")
def test_a_streamed_run_gives_the_bytes_of_a_stored_one_and_is_validated() -> None:
    (variant,) = published("streamed", last="card", stream=True).variants
    published("stored", last="card")
    assert staged("streamed") == staged("stored")
    assert variant.validation is not None
    assert variant.validation.modules == 14
    assert variant.validation.function is None
    assert variant.validation.function_skipped == "the weights are streamed, and the model is not on this machine"


@pytest.mark.usefixtures("served")
def test_at_no_moment_is_as_much_stored_as_one_pair_of_tensors(tmp_path: Path) -> None:
    peaks = []

    def measuring(what: str, done: int = 0, total: int = 0) -> None:  # noqa: ARG001 - called before each tensor
        results = [Path("dist/m"), *Path("dist/m.work").rglob("modules-*")]
        peaks.append(stored_in(tmp_path) - sum(map(stored_in, results)))

    Path("m.yaml").write_text(MANIFEST.format(source=pinned("o/source"), base=pinned("o/base")))
    run(Run(Path("m.yaml"), Path("dist"), device="cpu", last="validate", stream=True), measuring)
    assert len(peaks) > 30
    assert max(peaks) < LARGEST_PAIR / 4


def test_files_that_both_repositories_have_are_asked_for_their_header_once_and_for_nothing_else(
    served: LocalHub, pair: Path
) -> None:
    before = len(served.requests)
    published("dist", stream=True)
    asked = [request.split()[1] for request in served.requests[before:]]
    source, base = (digests(pair / side) for side in ("source", "base"))
    shared = set(source.values()) & set(base.values())
    assert shared
    assert {asked.count(f"/lfs/{digest}") for digest in shared} == {2}  # its length, and the header itself
    assert min(asked.count(f"/lfs/{digest}") for digest in {*source.values(), *base.values()} - shared) > 2


def digests(folder: Path) -> Mapping[str, str]:
    files = hub.list_files(f"o/{folder.name}", "main")
    return {file.path: file.sha256 for file in files if file.sha256 and file.path.endswith(".safetensors")}


def test_a_streamed_run_after_a_stored_one_reuses_its_results(served: LocalHub) -> None:
    published("dist", last="validate")
    before = served.bytes_sent
    (variant,) = published("dist", last="validate", stream=True).variants
    assert variant.reused == ("extract", "validate")
    assert served.bytes_sent - before < LARGEST_PAIR / 2  # listings and headers


@pytest.mark.usefixtures("served")
def test_a_local_folder_and_a_repository_go_together(pair: Path) -> None:
    Path("base").symlink_to(pair / "base")
    published("stored", base="{path: base}", last="loaders")
    assert stored_in(Path("cache")) > LARGEST_PAIR
    shutil.rmtree("cache")
    for command in (["--until", "extract"], ["extract"], ["validate"]):
        arguments = [*command, "--stream", "--device", "cpu", "--dist", "streamed", "--manifest", "m.yaml"]
        assert CliRunner().invoke(cli, arguments, catch_exceptions=False).exit_code == 0
    assert staged("streamed") == staged("stored")
    assert stored_in(Path("cache")) < LARGEST_PAIR / 4


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    "fp8",
    [
        pytest.param(("source",), marks=pytest.mark.long),
        pytest.param(("base",), marks=pytest.mark.long),
        ("source", "base"),
    ],
    ids="+".join,
)
def test_fp8_weights_stream_to_the_bytes_of_a_stored_run(pair: Path, fp8: tuple[str, ...]) -> None:
    for side in ("source", "base"):
        upload(f"o/fp8-{side}", in_two_files(pair / side, fp8=side in fp8))
    source, base = (pinned(f"o/fp8-{side}") for side in ("source", "base"))
    published("streamed", source=source, base=base, stream=True)
    published("stored", source=source, base=base)
    assert staged("streamed") == staged("stored")
    summary = json.loads(staged("streamed")["extraction.json"])["summary"]
    assert (summary["linears"], summary["fp8"]) == (14, list(fp8))


def in_two_files(folder: Path, *, fp8: bool) -> Path:
    """The checkpoint with its linears in FP8 if asked for, and all scales in another file than their weights."""
    target = Path(f"fp8-{folder.name}")
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    weights = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if fp8:
        quantise(weights, "_proj")
        say_fp8(target / "config.json")
    files = {name: "scales.safetensors" if "_scale_" in name else "weights.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weights[name] for name, place in files.items() if place == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return target


# --- a Hub that misbehaves ----------------------------------------------------------------------------------


def test_cut_connections_and_refusals_for_the_moment_change_nothing(served: LocalHub) -> None:
    published("undisturbed", stream=True)
    faults = [Fault("GET", "^/lfs/", cut_after=byte, times=2) for byte in (0, 1, 3, 1000, 20_000)]
    faults += [Fault("GET", "^/lfs/", cut=True, times=3), Fault("GET", "/resolve/.*safetensors$", cut=True)]
    faults += [Fault("GET", "^/lfs/", status=503), Fault("GET", "^/lfs/", status=429, retry_after=0)]
    for fault in faults:
        served.faults.add(fault)
    shutil.rmtree("cache")
    remote_headers._known.clear()
    published("disturbed", stream=True)
    assert [fault.times for fault in faults] == [0] * len(faults)
    assert staged("disturbed") == staged("undisturbed")


def test_a_range_is_taken_up_at_the_byte_where_it_broke(served: LocalHub, pair: Path) -> None:
    name = next(iter(digests(pair / "base")))
    content = (pair / "base" / name).read_bytes()
    revision = HfApi().model_info("o/base").sha or ""
    for byte in (1, 10_000, 50_000):
        served.faults.add(Fault("GET", "^/lfs/", cut_after=byte))
    before = served.bytes_sent
    found = b"".join(hub.stream("o/base", revision, filename=name, start=7, stop=len(content) - 5))
    assert found == content[7:-5]
    assert served.bytes_sent - before == len(found)


@pytest.mark.long
def test_a_hub_that_goes_on_breaking_is_given_up_with_what_was_done_kept(served: LocalHub) -> None:
    changed = "model.layers.2"
    fault = Fault("GET", "^/lfs/", cut=True, times=0)

    def until_late(what: str, done: int = 0, total: int = 0) -> None:  # noqa: ARG001 - a Progress
        if what.startswith(f"extracting {changed}") and not fault.times:
            fault.times = 1000
            served.faults.add(fault)

    Path("m.yaml").write_text(MANIFEST.format(source=pinned("o/source"), base=pinned("o/base")))
    options = Run(Path("m.yaml"), Path("dist"), device="cpu", last="extract", stream=True)
    with pytest.raises(UnclearAnswerError, match="cannot be reached"):
        run(options, until_late)
    served.faults.clear()
    assert 7 <= len(list(Path("dist").rglob("modules-*/*.json"))) < 14
    kept = {file: file.stat().st_mtime_ns for file in Path("dist").rglob("modules-*/*.json")}
    run(options, silent)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert len(list(Path("dist").rglob("modules-*/*.json"))) == 14


@pytest.mark.usefixtures("served")
def test_a_file_whose_parts_the_hub_does_not_send_is_refused() -> None:
    revision = HfApi().model_info("o/base").sha or ""
    with pytest.raises(HubError, match=r"asked for bytes 0-3 and answered with the whole file.*without --stream"):
        next(hub.stream("o/base", revision, filename="config.json", start=0, stop=4))


# --- tensors ------------------------------------------------------------------------------------------------

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.tensor(2.5, dtype=torch.bfloat16),
    "c": torch.tensor([True, False, True]),
    "d": torch.arange(5, dtype=torch.uint8),
    "e": torch.arange(7).to(torch.float8_e4m3fn),
    "f": torch.empty(0, 4, dtype=torch.float16),
    "g": torch.arange(30_000, dtype=torch.int64),
    "h": torch.arange(40_000, dtype=torch.bfloat16).reshape(200, 200),
    "i": torch.tensor([1 + 2j]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("ahead", [0, 100, 100_000, 10_000_000])
def test_tensors_of_every_kind_arrive_as_they_were_saved(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    upload("o/kinds", checkpoint(save(TENSORS)))
    monkeypatch.setattr(streaming, "_AHEAD", ahead)
    snapshot = snapshot_of("o/kinds")
    headers = headers_of(snapshot)
    saved = load_file("checkpoint/model.safetensors")
    assert {name: header.shape for name, header in headers.items()} == {n: tuple(t.shape) for n, t in saved.items()}
    with reader_of(snapshot, headers) as reader:
        for name in [*saved, *reversed(saved)]:
            found = reader.read(name)
            assert found.dtype == saved[name].dtype
            assert found.shape == saved[name].shape
            assert bits(found).equal(bits(saved[name]))
            blocks = list(reader.blocks(name, 999))
            assert [len(block) for block in blocks[:-1]] == [999] * (len(blocks) - 1)
            assert torch.cat([torch.empty(0, dtype=torch.uint8), *map(bits, blocks)]).equal(bits(saved[name]))


def test_whoever_stops_early_leaves_the_rest_on_the_hub(served: LocalHub) -> None:
    upload("o/large", checkpoint(save({"large": torch.zeros(8_000_000)})))
    snapshot = snapshot_of("o/large")
    with reader_of(snapshot, headers_of(snapshot)) as reader:
        before = served.bytes_sent
        next(reader.blocks("large", 1000))
    assert served.bytes_sent - before < 16_000_000  # and those were on their way


def test_small_neighbours_come_in_one_request(served: LocalHub) -> None:
    upload("o/small", checkpoint(save({f"t{index}": torch.full((10,), index) for index in range(9)})))
    snapshot = snapshot_of("o/small")
    before = len(served.requests)
    with reader_of(snapshot, headers_of(snapshot)) as reader:
        assert [int(reader.read(f"t{index}")[0]) for index in range(9)] == list(range(9))
    assert len(served.requests) - before == 2  # the file's address, and the bytes


# --- what is refused ----------------------------------------------------------------------------------------


def checkpoint(content: bytes) -> Path:
    folder = Path("checkpoint")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(content)
    return folder


def described(header: object, data: bytes = b"") -> bytes:
    return frame_header(json.dumps(header).encode()) + data


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), *, start: int = 0, stop: int = 8) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"abc", "it is shorter than its header says"),
        (b"\xff" * 100, "it is shorter than its header says"),
        (described({})[:8] + b"{", "it is shorter than its header says"),
        ((2).to_bytes(8, "little") + b"[]", "its header cannot be read"),
        ((2).to_bytes(8, "little") + b"{]", "its header cannot be read"),
        (described({"a": {"dtype": "F32"}}), "has no dtype, shape and two data_offsets"),
        (described({"a": entry(shape=(-2, -1))}, b"x" * 8), "no whole numbers"),
        (described({"a": entry()}, b"x" * 7), "its tensors end at"),
        (described({"a": entry()}, b"x" * 9), "its tensors end at"),
        (described({"a": entry(shape=(3,))}, b"x" * 8), "has 8 bytes, not those of its shape in F32"),
        (described({"a": entry("F3")}, b"x" * 8), "dtype 'F3', which is not known"),
        (described({"a": entry(start=4, stop=12)}, b"x" * 12), "do not begin where those before it end"),
        (described({"a": entry(), "b": entry()}, b"x" * 8), "do not begin where those before it end"),
    ],
)
def test_a_damaged_file_is_refused_by_its_header(content: bytes, words: str) -> None:
    upload("o/damaged", checkpoint(content))
    with pytest.raises(FetchError, match=f"model.safetensors of o/damaged@.*not a whole safetensors file: .*{words}"):
        snapshot_of("o/damaged")


@pytest.mark.usefixtures("served")
def test_a_checkpoint_without_tensors_is_refused() -> None:
    upload("o/empty", checkpoint(described({})))
    with pytest.raises(FetchError, match=r"o/empty@.* holds no tensor"):
        snapshot_of("o/empty")


@pytest.mark.usefixtures("served")
def test_shards_that_are_missing_or_do_not_hold_what_the_index_says_are_refused() -> None:
    folder = checkpoint(b"")
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    upload("o/shards", folder)
    with pytest.raises(FetchError, match=r"names the shard two\.safetensors, which is missing"):
        snapshot_of("o/shards")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    upload("o/shards", folder)
    with pytest.raises(FetchError, match="names 1 tensors that its shards do not hold, the first b"):
        snapshot_of("o/shards")


@pytest.mark.usefixtures("served")
def test_weights_that_git_itself_keeps_have_no_digest_to_record_and_are_refused() -> None:
    HfApi().create_repo("o/git")
    plain = [CommitOperationAdd(".gitattributes", b""), CommitOperationAdd("config.json", b"{}")]
    HfApi().create_commit("o/git", plain, commit_message="plain")
    HfApi().create_commit("o/git", [CommitOperationAdd("model.safetensors", b"text")], commit_message="weights")
    with pytest.raises(FetchError, match=r"is kept in git itself.*without --stream"):
        snapshot_of("o/git")


@pytest.mark.usefixtures("served")
def test_pickled_weights_are_refused_as_in_a_stored_run() -> None:
    folder = checkpoint(b"")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    upload("o/pickled", folder)
    with pytest.raises(FetchError, match=r"holds only pickled weights"):
        snapshot_of("o/pickled")
