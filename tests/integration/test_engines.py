"""What an engine promises to a stage, on this machine and on a Ray cluster of two."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from publisher.engines import Engine, engine_named
from publisher.engines.ray_engine import OnRay
from publisher.errors import EngineError, ExtractionError, ManifestError
from tests.clusters import ROOT, Machines, Squares
from tests.manypairs import make_pair

STANDING = (0, pytest.param(1000, marks=pytest.mark.long))  # bytes that a worker keeps between units


def unheard(what: str) -> None:
    assert what


@pytest.fixture(scope="module")
def ray_engine(machines: Machines) -> Iterator[OnRay]:
    """That of two machines, joined once for all tests; none takes a machine away."""
    assert machines.cluster
    with engine_named("ray", "cpu") as found:
        assert isinstance(found, OnRay)
        yield found


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each of the engines."""
    if request.param == "ray":
        yield request.getfixturevalue("ray_engine")
        return
    with engine_named("local", "cpu") as found:
        yield found


def squared(engine: Engine, job: Squares, units: "list[int] | range") -> dict[int, int]:
    with engine.run(job, units, report=unheard) as results:
        return {unit: result[0] for unit, result in results}


def left(folder: Path, what: str) -> int:
    return len(list(folder.glob(f"{what}-*")))


def python(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# --- either engine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("standing", STANDING)
def test_every_unit_gives_its_result_once(engine: Engine, tmp_path: Path, standing: int) -> None:
    job = Squares(tmp_path, standing_=standing)
    assert squared(engine, job, range(20)) == {unit: unit * unit for unit in range(20)}
    assert left(tmp_path, "tried") == 20


@pytest.mark.parametrize("standing", STANDING)
def test_no_units_are_no_work(engine: Engine, tmp_path: Path, standing: int) -> None:
    assert squared(engine, Squares(tmp_path, standing_=standing), []) == {}


@pytest.mark.parametrize("standing", STANDING)
def test_what_a_job_says_about_its_unit_ends_the_run_at_once_in_its_own_words(
    engine: Engine, tmp_path: Path, standing: int
) -> None:
    with pytest.raises(ExtractionError) as raised:
        squared(engine, Squares(tmp_path, fails="is refused", standing_=standing), range(20))
    assert str(raised.value) == "it holds NaN. Expected a number. Next: check it."
    assert left(tmp_path, "tried-3") == 1


def test_units_are_taken_as_there_is_room_for_them(engine: Engine, tmp_path: Path) -> None:
    taken = 0

    def units() -> Iterator[int]:
        nonlocal taken
        for unit in range(1000):
            taken += 1
            yield unit

    with engine.run(Squares(tmp_path), units(), report=unheard) as results:
        for done, _ in enumerate(results, start=1):
            assert taken <= done + 9, "no more than eight are under way, and one is at hand"
            if done == 50:
                break
    assert taken < 70


def test_what_is_being_done_is_told(engine: Engine, tmp_path: Path) -> None:
    told: list[str] = []
    with engine.run(Squares(tmp_path), range(3), report=told.append) as results:
        assert len(list(results)) == 3
    assert any(what.startswith("squaring 0") for what in told)


def test_to_leave_the_block_is_to_cancel_the_rest(engine: Engine, tmp_path: Path) -> None:
    with engine.run(Squares(tmp_path), range(1000), report=unheard) as results:
        next(results)
    assert squared(engine, Squares(tmp_path), [5]) == {5: 25}, "the engine goes on"
    assert left(tmp_path, "tried") < 30


@pytest.mark.ray
def test_both_engines_say_that_they_are_the_same_machine(ray_engine: OnRay) -> None:
    with engine_named("local", "cpu") as local:
        assert ray_engine.machine == local.machine


# --- a cluster ----------------------------------------------------------------------------------------------


@pytest.mark.ray
def test_units_are_done_in_processes_of_their_own(ray_engine: OnRay, tmp_path: Path) -> None:
    with ray_engine.run(Squares(tmp_path), range(40), report=unheard) as results:
        processes = {process for _, (_, process) in results}
    assert os.getpid() not in processes
    assert 1 <= len(processes) <= 2, "as many as there are workers; on a busy machine one may do them all"


@pytest.mark.ray
def test_a_job_with_something_standing_is_opened_once_by_each_worker_and_closed(
    ray_engine: OnRay, tmp_path: Path
) -> None:
    with ray_engine.run(Squares(tmp_path, standing_=1), range(40), report=unheard) as results:
        processes = {process for _, (_, process) in results}
    assert len(processes) <= left(tmp_path, "opened") == left(tmp_path, "closed") <= 2


@pytest.mark.ray
def test_no_more_workers_are_started_than_there_are_units(ray_engine: OnRay, tmp_path: Path) -> None:
    assert squared(ray_engine, Squares(tmp_path, standing_=1), [7]) == {7: 49}
    assert left(tmp_path, "opened") == 1


@pytest.mark.ray
@pytest.mark.parametrize("standing", STANDING)
@pytest.mark.long
def test_a_unit_whose_worker_is_lost_is_given_to_another(ray_engine: OnRay, tmp_path: Path, standing: int) -> None:
    job = Squares(tmp_path, fails="dies once", standing_=standing)
    assert squared(ray_engine, job, range(20)) == {unit: unit * unit for unit in range(20)}
    assert left(tmp_path, "tried-3") == 2
    assert left(tmp_path, "tried") == 21, "nothing else is done again"


@pytest.mark.ray
@pytest.mark.parametrize("standing", STANDING)
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        pytest.param("dies", r"(WorkerCrashed|ActorDied)Error", marks=pytest.mark.long),
        ("cannot be read", r"a file is missing\. Expected it\. Next: look for"),
    ],
)
def test_a_unit_that_fails_three_times_for_one_reason_ends_the_run_by_its_name(
    ray_engine: OnRay, tmp_path: Path, fails: str, standing: int, reason: str
) -> None:
    with pytest.raises(EngineError, match=rf"squaring 3 failed 3 times: {reason}"):
        squared(ray_engine, Squares(tmp_path, fails=fails, standing_=standing), range(20))
    assert left(tmp_path, "tried-3") == 3


@pytest.mark.ray
def test_a_worker_that_is_not_as_the_first_is_refused_by_what_differs(ray_engine: OnRay, tmp_path: Path) -> None:
    other = OnRay("cpu", address="ray")
    packages = {**ray_engine.machine.packages, "torch": "2.0.0"}
    other._firsts[False] = replace(ray_engine.machine, packages=packages)  # as if the first had been so
    with pytest.raises(EngineError, match=r"squaring 0 failed 3 times: the worker on .* torch 2\.0\.0 and 2\."):
        squared(other, Squares(tmp_path), [0])
    assert not left(tmp_path, "tried")


# --- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rya", "ray://host", "ray://:10001", "dask"])
def test_an_engine_that_is_not_known_is_named(name: str) -> None:
    with pytest.raises(ManifestError, match=rf"--engine {name} is not known. Expected local, ray, or ray://HOST:PORT"):
        _enter(name)


def test_a_device_of_this_machine_is_not_one_of_the_cluster() -> None:
    with pytest.raises(ManifestError, match="--device cuda:1 names a device of this machine"):
        _enter("ray", "cuda:1")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_engine")
def test_a_gpu_is_asked_for_where_the_cluster_has_none() -> None:
    with pytest.raises(EngineError, match="no machine of the cluster --engine ray has a GPU"):
        OnRay("cuda", address="ray")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "host.invalid:6379"])
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(EngineError, match=rf"no Ray cluster could be joined \({address}: "):
        _enter("ray")
    with pytest.raises(EngineError, match=rf"no Ray cluster could be joined \(ray://{address}: "):
        _enter(f"ray://{address}")


def _enter(name: str, device: str = "cpu") -> None:
    with engine_named(name, device):
        pass


# --- without Ray --------------------------------------------------------------------------------------------


def test_without_ray_the_engine_says_what_to_install() -> None:
    hidden = "import sys; sys.modules['ray'] = None; from publisher.cli.app import main; main()"
    manifest = str(ROOT / "manifests/demo.yaml")
    done = python(hidden, "-m", manifest, "--engine", "ray", "--until", "extract")
    assert done.returncode == 2
    assert "--engine ray needs the package ray, which is not installed" in done.stderr
    assert "pip install 'lora-publisher[ray]'" in done.stderr


@pytest.mark.long
def test_without_the_option_ray_is_never_imported(tmp_path: Path) -> None:
    make_pair(tmp_path, modules=3)
    code = f"""
import os, sys
os.chdir({str(tmp_path)!r})
from publisher.cli.app import cli
cli(["-m", "pico.yaml", "--until", "extract", "--device", "cpu"], standalone_mode=False)
print([name for name in sys.modules if name.split(".")[0] in ("ray", "grpc")])
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == []
