"""Runs that die: killed at any moment, interrupted in one long instruction, out of disk, or two at a time."""

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from publisher.errors import BusyError, NoRoomError, PublisherError
from publisher.pipeline.run import Run, run
from publisher.records.lock import locked
from publisher.records.progress import silent
from tests.forks import forks, publish_apart
from tests.models import write_llama_config

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

ROOT = Path(__file__).parents[2]
FEW, MANY = 3, 20
at_place = pytest.mark.usefixtures("place")
ADAPTER = "adapter: {method: svd, rank: auto, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}"
MANIFEST = """\
version: 1
repo: o/pico
license: apache-2.0
variants:
  - {path: /, label: Pico, source: {path: pair/source}, base: {path: pair/base}, model_class: LlamaForCausalLM, ADAPTER}
card: {template: lora_card.md.j2, title: Pico, summary: One adapter.}
""".replace("ADAPTER", ADAPTER)
SIZE, MODULES = 320, 14  # large enough for the randomized SVD, and some 10 ms of work each


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints that differ in 14 linears by updates of rank 8. Read them, never write into them."""
    return make_pair(tmp_path_factory.mktemp("pair"), size=SIZE, modules=MODULES, rank=8)


def make_pair(folder: Path, *, size: int, modules: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> Path:
    generator = torch.Generator().manual_seed(3)
    weights: dict[str, dict[str, torch.Tensor]] = {"source": {}, "base": {}}
    for index in range(modules):
        name = f"model.layers.{index}.mlp.up_proj.weight"
        base = torch.randn(size, size, generator=generator)
        left, right = (torch.randn(*shape, generator=generator) for shape in ((size, rank), (rank, size)))
        weights["base"][name] = base.to(dtype)
        weights["source"][name] = (base.to(dtype).float() + 0.1 * left @ right).to(dtype)
    for side, tensors in weights.items():
        (folder / side).mkdir()
        write_llama_config(folder / side, size=size, layers=modules)
        save_file(tensors, folder / side / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def place(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the pair and its manifest."""
    return settle(tmp_path, pair, monkeypatch)


def settle(folder: Path, pair: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "pair").symlink_to(pair)
    (folder / "pico.yaml").write_text(MANIFEST)
    monkeypatch.chdir(folder)
    return folder


def options(dist: Path = Path("dist")) -> Run:
    return Run(Path("pico.yaml"), dist, device="cpu", last="extract")


def staged(dist: Path = Path("dist")) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (dist / "pico").iterdir()}


def kept(dist: Path = Path("dist")) -> dict[Path, int]:
    """Modules whose figures are written, and when their factors were."""
    figures = dist.glob("pico.work/root/modules-*/*.json")
    return {file: file.with_suffix(".safetensors").stat().st_mtime_ns for file in figures}


def publish(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "publisher", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def undisturbed(pair: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run that nothing disturbs leaves."""
    with pytest.MonkeyPatch.context() as patch:
        folder = settle(tmp_path_factory.mktemp("undisturbed"), pair, patch)
        run(options(), silent)
        return staged(folder / "dist")


# --- killed -------------------------------------------------------------------------------------------------


def begun() -> ForkServerProcess:
    """A process in which a run has begun."""
    holder = Path("dist/pico.work/lock.holder")
    process = forks().Process(target=run, args=(options(), silent))
    process.start()
    while not holder.exists():
        time.sleep(0.002)
    return process


@pytest.mark.parametrize("kills", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_goes_on_from_there_and_ends_with_the_same_bytes(
    place: Path, undisturbed: dict[str, bytes], kills: int
) -> None:
    whole = seconds_of(begun())
    moments = random.Random(7)  # noqa: S311 - moments, not secrets
    finished = []
    for _ in range(kills):
        shutil.rmtree("dist")
        process = begun()
        wanted = moments.randrange(MODULES)  # not by the clock alone: a busy machine would die at the beginning
        while process.is_alive() and len(kept()) < wanted:
            time.sleep(0.001)
        process.join(moments.uniform(0, whole / 4))
        process.kill()
        process.join()
        before = kept()
        finished.append(len(before) if process.exitcode == -signal.SIGKILL else MODULES)
        run(options(), silent)
        assert staged() == undisturbed
        assert {file: changed for file, changed in kept().items() if file in before} == before, "work was done twice"
        assert not list(place.glob("dist/**/.*.partial"))
    assert len(set(finished)) > kills / 4, f"the moments were not spread: {finished}"


def seconds_of(process: ForkServerProcess) -> float:
    start = time.monotonic()
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - start


@pytest.mark.parametrize("damage", ["cut short", "altered", "removed", "figures cut short"])
def test_a_kept_module_that_was_damaged_is_made_again(place: Path, undisturbed: dict[str, bytes], damage: str) -> None:
    run(options(), silent)
    before = kept()
    spoilt = sorted(before)[3]
    factors = spoilt.with_suffix(".safetensors")
    content = factors.read_bytes()
    if damage == "removed":
        factors.unlink()
    elif damage == "figures cut short":
        spoilt.write_bytes(spoilt.read_bytes()[:-20])
    else:
        factors.write_bytes(content[:-20] if damage == "cut short" else content[:-1] + bytes([content[-1] ^ 1]))
    shutil.rmtree(place / "dist" / "pico")
    run(options(), silent)
    assert staged() == undisturbed
    assert {file for file, changed in kept().items() if changed != before[file]} <= {spoilt}
    assert factors.read_bytes() == content


@pytest.mark.long
def test_ctrl_c_ends_a_run_that_is_inside_one_long_factorisation_within_two_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = make_pair(tmp_path, size=2400, modules=1, rank=2400, dtype=torch.float32)
    (tmp_path / "run").mkdir()
    settle(tmp_path / "run", large, monkeypatch)
    command = publish("--manifest", "pico.yaml", "--until", "extract", "--device", "cpu")
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("extracting"):
                break
        time.sleep(2)
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        told = process.stderr.read()
        code = process.wait()
        seconds = time.monotonic() - start
    assert code == 130
    assert told.endswith("the same command goes on from there\n")
    assert seconds < 2


# --- a full disk --------------------------------------------------------------------------------------------


def full(text: str) -> re.Match[str] | None:
    return re.search(
        r"(\S+) has no room for (\S+) \((.+?)\)\. Expected ([\d.]+ [kM]?B) \(([\d.]+ [kMG]?B) are free\)\. Next: ", text
    )


@pytest.fixture
def small_disk(place: Path) -> Iterator[Path]:
    """A file system of 80 kB at ./dist; root makes it, and where root may not, this test cannot run."""
    Path("dist").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", "dist"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine mounts no file system for us: {made.stderr.decode().strip()}")
    yield place / "dist"
    subprocess.run(["umount", place / "dist"], check=True)


def test_a_full_disk_is_named_and_the_next_run_goes_on(small_disk: Path, undisturbed: dict[str, bytes]) -> None:
    with pytest.raises(NoRoomError) as refused:
        run(options(), silent)
    found = full(str(refused.value))
    assert found, refused.value
    assert found[1].startswith("dist/pico.work/root/modules-")
    assert found[3] == os.strerror(errno.ENOSPC)
    before = kept()
    assert 2 < len(before) < MODULES
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    run(options(), silent)
    assert staged() == undisturbed
    assert {file: changed for file, changed in kept().items() if file in before} == before


@at_place
def test_a_limit_on_the_size_of_files_is_told_like_a_full_disk(undisturbed: dict[str, bytes]) -> None:
    """The kept modules fit, the adapter does not."""
    limit = len(undisturbed["adapter_model.safetensors"]) - 1
    answers = forks().SimpleQueue()
    process = forks().Process(target=limited, args=(limit, answers))
    process.start()
    told = answers.get()
    process.join()
    found = full(told)
    assert found, told
    assert found.groups()[:3] == ("dist/pico", "adapter_model.safetensors", os.strerror(errno.EFBIG))
    assert len(kept()) == MODULES
    before = kept()
    run(options(), silent)
    assert staged() == undisturbed
    assert kept() == before


def limited(limit: int, answers: "SimpleQueue[str]") -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        run(options(), silent)
    except PublisherError as error:
        answers.put(str(error))
    else:
        answers.put("it fitted")


@pytest.mark.usefixtures("small_disk")
def test_with_a_fixed_rank_the_room_is_looked_at_before_the_long_work() -> None:
    manifest = Path("pico.yaml")
    manifest.write_text(MANIFEST.replace("rank: auto", "rank: 8"))
    with pytest.raises(NoRoomError, match=r"^dist/pico.work has no room for the adapter and its modules"):
        run(options(), silent)
    assert kept() == {}


# --- two at once --------------------------------------------------------------------------------------------


@at_place
def test_a_second_run_on_the_same_output_is_refused_and_told_who_is_at_work(undisturbed: dict[str, bytes]) -> None:
    process = begun()
    with pytest.raises(BusyError, match=rf"^dist/pico\.work is in use by process {process.pid} \(.*\)\. Expected one"):
        run(options(), silent)
    process.join()
    assert process.exitcode == 0
    assert staged() == undisturbed
    assert not Path("dist/pico.work/lock.holder").exists()


@at_place
def test_two_runs_with_outputs_of_their_own_do_not_meet(undisturbed: dict[str, bytes]) -> None:
    with locked(Path("other/pico.work")):
        run(options(), silent)
    assert staged() == undisturbed


@at_place
def test_the_lock_of_a_run_that_was_killed_blocks_nobody() -> None:
    process = forks().Process(target=hold, args=(Path("dist/pico.work"),))
    process.start()
    while not Path("dist/pico.work/lock.holder").exists():
        time.sleep(0.005)
    process.kill()
    process.join()
    assert Path("dist/pico.work/lock.holder").exists()
    run(options(), silent)


def hold(work: Path) -> None:
    with locked(work):
        time.sleep(60)


@at_place
def test_the_command_line_ends_with_1_where_another_run_is_at_work() -> None:
    with locked(Path("dist/pico.work")):
        environment = os.environ | {"HF_HOME": "home"}
        answer = publish_apart("publish extract --manifest pico.yaml", environment=environment, seconds=600).answer
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: dist/pico.work is in use by process ")
