"""docs/scale.md, of what `benchmarks/scale.py` has measured: costs as they are, and what follows from them."""

import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import psutil
import torch

from benchmarks import capacity, extraction
from benchmarks.capacity import WIDTH, Costs, Line, Model, Shape, break_even, factors_of
from publisher.engines import ray_engine
from publisher.extraction import module
from publisher.pipeline.stages import validate

STORAGE = {"1.25 GB/s (10 Gbit/s)": 1.25e9, "12.5 GB/s (100 Gbit/s)": 12.5e9}
WORKERS = (1, 8, 64, 512)
GPUS = (80, 141)  # GB of memory
EXPERTS: Mapping[Shape, int] = {(2048, 7168): 2 * 60 * 384, (7168, 2048): 60 * 384}  # of the 1T
Figures = Mapping[str, Any]


# --- models -------------------------------------------------------------------------------------------------


def models() -> tuple[Model, ...]:
    """The models of the extrapolation; PAGE tells what is assumed of them."""
    attention = {(1536, 7168): 61, (12288, 1536): 61, (576, 7168): 61, (16384, 512): 61, (7168, 8192): 61}
    dense = {(18432, 7168): 2, (7168, 18432): 1, (2048, 7168): 2 * 60, (7168, 2048): 60}
    others = 2 * 163840 * 7168 + 60 * 384 * 7168  # embeddings, head and routers
    apart = _adding(attention, dense)
    everything = _adding(apart, EXPERTS)
    total = _elements(everything) + others
    return (
        Model("27B, dense", _qwen(), 27_500_000_000),
        Model("405B, dense", _llama(), _elements(_llama()) + 2 * 128256 * 16384),
        Model("1T, experts equal", apart, total),
        Model("1T, experts as linears", everything, total),
    )


def _experts() -> int:
    """Their elements."""
    return _elements(EXPERTS)


def _qwen() -> Counter[Shape]:
    """Qwen3.6-27B: 48 layers with linear attention, 16 with full attention."""
    shapes = Counter[Shape]()
    for name, shape in extraction.LINEARS.items():
        shapes[shape] += {"mlp": 64, "linear_attn": 48, "self_attn": 16}[name.partition(".")[0]]
    return shapes


def _llama() -> Counter[Shape]:
    layer = {(16384, 16384): 2, (1024, 16384): 2, (53248, 16384): 2, (16384, 53248): 1}
    return Counter({shape: 126 * count for shape, count in layer.items()})


def _adding(*shapes: Mapping[Shape, int]) -> Counter[Shape]:
    return sum((Counter(one) for one in shapes), Counter[Shape]())


def _elements(shapes: Mapping[Shape, int]) -> int:
    return sum(count * math.prod(shape) for shape, count in shapes.items())


# --- costs --------------------------------------------------------------------------------------------------


def costs_of(found: Figures, shapes: Sequence[Shape]) -> Costs:
    """What the extrapolation goes by; a worker is taken to be busy as long as the cluster is."""
    empty, results, units = (found[f"{kind} ray"]["each"] for kind in ("empty", "results", "units"))
    workers, size = found["sizes"]["workers"], found["results ray"]["bytes"]
    task = workers * empty - found["empty local"]["each"]
    large = workers * results - found["results local"]["each"]

    def line(work: str) -> Line:
        ends = ((math.prod(shape), found[f"{work} {_text(shape)} ray"]["inside"]) for shape in (shapes[0], shapes[-1]))
        return Line.through(*ends)

    return Costs(
        task=task,
        task_byte=max(large - task, 0.0) / size,
        driver=empty,
        taking=max(results - empty, 0.0) / size,
        sending=max(units - empty, 0.0) / size,
        waiting=found["waiting"]["each"] / found["sizes"]["waiting"],
        writing=found["write"]["seconds"] / found["write"]["bytes"],
        extracting=line("extract"),
        checking=line("check"),
        weighing=found["weigh"]["bytes"] / found["weigh"]["seconds"],
        comparing=found["compare ray"]["bytes"] / found["compare ray"]["seconds"],
        hashing=found["hash"]["bytes"] / found["hash"]["seconds"],
    )


def _text(shape: Shape) -> str:
    return "{}x{}".format(*shape)


# --- the page -----------------------------------------------------------------------------------------------


def page(found: Figures, *, shapes: Sequence[Shape]) -> str:
    """The whole of docs/scale.md."""
    costs = costs_of(found, shapes)
    side = capacity.smallest_side(costs)
    stream, largest = found["stream"], _Memory.of(found, shapes[-1])
    return PAGE.format(
        machine=_machine(),
        store=f"{found['sizes']['store'] / 1e6:.0f}",
        runs=found["sizes"]["runs"],
        waiting=f"{found['sizes']['waiting']:,}",
        wait=f"{1e3 * found['waiting']['each']:.2f}",
        starting=_table(_starting(found)),
        many=_table(_many(found)),
        units=_table(_unit(found, shape) for shape in shapes),
        memory=_table(_memory(found, shape) for shape in shapes),
        imported=f"{found[f'extract {_text(shapes[-1])} ray']['before'] / 1e6:.0f}",
        checker=f"{found[f'check {_text(shapes[-1])} ray']['before'] / 1e6:.0f}",
        part=f"{found['compare ray']['bytes'] / 2 / 1e6:.0f}",
        process=f"{ray_engine.PROCESS / 1e6:.0f}",
        comparing=f"{found['compare ray']['memory'] / 1e6:.0f}",
        compared=f"{found['compare local']['bytes'] / found['compare local']['seconds'] / 1e9:.1f}",
        remote=f"{costs.comparing / 1e9:.1f}",
        weighing=f"{costs.weighing / 1e9:.1f}",
        hashed=f"{costs.hashing / 1e9:.1f}",
        streamed=f"{stream['bytes'] / stream['seconds'] / 1e9:.2f}",
        written=f"{1 / costs.writing / 1e9:.2f}",
        task=f"{1e3 * costs.task:.1f}",
        megabyte=f"{1e9 * costs.task_byte:.2f}",
        module=f"{costs.extracting.module:.2f}",
        each=f"{1e9 * costs.extracting.element:.0f}",
        check_module=f"{costs.checking.module:.2f}",
        check_each=f"{1e9 * costs.checking.element:.0f}",
        side=side,
        seconds=f"{costs.extracting.of(side**2):.1f}",
        size=f"{2 * side**2 / 1e6:.0f}",
        pays=_table(row for shape in shapes[1:] for row in _pays(found, costs, shape)),
        models=_table(map(_model, models())),
        reads=_table(map(_reads, models())),
        needs=_table(_needs(model, costs, largest) for model in models()),
        times=_table(_time(model, costs, name) for model in models() for name in STORAGE),
        left=_duration(2 * WIDTH * _experts() / costs.weighing),
        gpus=_table(map(_gpus, models()[:3])),
        reading=f"{64 * costs.comparing / 1e9:.0f}",
    )


def _table(rows: Iterable[Sequence[object]]) -> str:
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in rows)


def _starting(found: Figures) -> Iterable[Sequence[str]]:
    for name, which in (("start Ray on this machine alone", "start"), ("join a running cluster", "join")):
        member, first = (found[which][part] for part in ("member", "first"))
        yield name, f"{member:.1f} s", f"{first:.1f} s", f"{member + first:.1f} s"


def _many(found: Figures) -> Iterable[Sequence[str]]:
    names = {"empty": "nothing", "results": "a result of {size:.1f} MB", "units": "a unit of {size:.1f} MB"}
    for kind, name in names.items():
        there, here = found[f"{kind} ray"], found[f"{kind} local"]
        yield (
            name.format(size=there["bytes"] / 1e6),
            f"{there['units']:,}",
            f"{1e3 * here['each']:.2f} ms",
            f"{1e3 * there['each']:.2f} ms",
            f"{1e3 * (found['sizes']['workers'] * there['each'] - here['each']):.1f} ms",
            f"{1e3 * there['driver_cpu']:.2f} ms",
            f"{there['before'] / 1e6:,.0f} MB, {there['peak'] / 1e6:,.0f} MB",
            f"{here['peak'] / 1e6:,.0f} MB",
        )


def _unit(found: Figures, shape: Shape) -> Sequence[str]:
    text, elements = _text(shape), math.prod(shape)
    seconds = [found[f"extract {text} {how}"]["seconds"] for how in ("1", "2", "ray")]
    work = found[f"extract {text} ray"]["inside"]
    cells = [_times(shape), *(f"{one:.2f} s" for one in (*seconds, work)), f"{1e9 * work / elements:.0f} ns"]
    return *cells, *(f"{found[f'check {text}{how}']['seconds']:.2f} s" for how in ("", " ray"))


def _memory(found: Figures, shape: Shape) -> Sequence[str]:
    asked = {"extract": module.room_for(shape, extraction.SETTINGS), "check": validate.room_for(shape)}
    sizes = [(found[f"{work} {_text(shape)} ray"]["memory"], room) for work, room in asked.items()]
    elements = math.prod(shape)
    cells = ((f"{size / 1e6:,.0f} MB", f"{size / elements:.1f}", f"{room / 1e6:,.0f} MB") for size, room in sizes)
    return _times(shape), *chain.from_iterable(cells)


def _pays(found: Figures, costs: Costs, shape: Shape) -> Iterable[Sequence[object]]:
    """One thread does in a task what it does on the local engine: the quicker of both times stands for it."""
    text = _text(shape)
    inside = found[f"extract {text} ray"]["inside"]
    remote = inside + costs.task + costs.task_byte * factors_of(shape)
    alone = [found[f"extract {text} {threads}"]["seconds"] for threads in (1, 2)]
    for which in ("start", "join"):
        begun = found[which]["member"] + found[which]["first"]
        for workers in (2, 8):
            counts = (
                break_even(start=begun, local=local, remote=remote, workers=workers)
                for local in (min(alone[0], inside), alone[1])
            )
            yield _times(shape), which, workers, *("never" if count is None else count for count in counts)


def _model(model: Model) -> Sequence[str]:
    largest = max(model.adapted, key=math.prod)
    share = f"{model.elements / model.parameters:.1%}"
    return model.name, f"{model.parameters / 1e9:,.1f}", f"{model.modules:,}", share, _times(largest)


def _reads(model: Model) -> Sequence[str]:
    sizes = (model.hashed, model.compared, model.extracted, model.extracted)
    return model.name, *(f"{size / 1e9:,.0f} GB" for size in sizes)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Of an extracting worker: bytes of its process, and for each element of a weight."""

    process: int
    element: float

    @classmethod
    def of(cls, found: Figures, shape: Shape) -> Self:
        """As measured with this shape."""
        worker = found[f"extract {_text(shape)} ray"]
        return cls(worker["before"], worker["memory"] / math.prod(shape))


def _needs(model: Model, costs: Costs, memory: _Memory) -> Sequence[str]:
    taken = memory.process + memory.element * model.largest
    return (
        model.name,
        _duration(costs.extracting.of(model.elements, modules=model.modules)),
        _duration(costs.checking.of(model.elements, modules=model.modules)),
        f"{taken / 1e9:.1f} GB",
        f"{(ray_engine.PROCESS + module.room_for((model.largest,), extraction.SETTINGS)) / 1e9:.1f} GB",
        f"2 x {model.factors / 1e9:,.1f} GB",
        f"{capacity.waiting_results(model, 512) / 1e9:,.1f} GB",
        f"{model.disk / 1e9:,.0f} GB",
    )


def _time(model: Model, costs: Costs, storage: str) -> Sequence[str]:
    cells = []
    for workers in WORKERS:
        stages = capacity.stages(model, costs, workers=workers, storage=STORAGE[storage])
        later = [time for stage, time in stages.items() if stage != "hashing"]
        cells.append(f"{_duration(sum(time.seconds for time in later))}, {capacity.limit_of(later)}")
    hashing = capacity.stages(model, costs, workers=1, storage=STORAGE[storage])["hashing"]
    return model.name, storage, _duration(hashing.seconds), *cells


def _gpus(model: Model) -> Sequence[str]:
    size = 2 * model.parameters
    return model.name, f"{size / 1e9:,.0f} GB", *(str(math.ceil(size / 1e9 / one)) for one in GPUS)


def _times(shape: Shape) -> str:
    return "{} x {}".format(*shape)


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _machine() -> str:
    busy = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} logical processors ({platform.machine()}), {psutil.virtual_memory().total / 2**30:.0f} GiB, "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}; load average at the end "
        f"{busy:.1f}"
    )


PAGE = """\
# Beyond one machine

Written by `python -m benchmarks.scale --write docs/scale.md`, as measured in one run; the method is told in that file.
The first half is measured. The second half is an extrapolation from it: **no model was run at those sizes, no cluster
had more than two workers, and no figure of a GPU was measured**, since this machine has none. How to run on a cluster
is told in [cluster.md](cluster.md), the whole process on this machine in [performance.md](performance.md).

Machine: {machine}.

The cluster is one of two nodes with one CPU each and an object store of {store} MB, both on this machine. Driver, two
workers and Ray's own processes share its processors, so a cluster of real machines has less to pay for each unit, and a
network to cross instead of a loopback.

## What Ray costs

| | a member of the cluster | the first worker answers | together |
|---|---|---|---|
{starting}

The import of `ray` is in it, and of torch by the worker. Units without work, given back by the local engine and by the
cluster:

| carried | units | local, each | Ray, each | worker's time beyond | driver's CPU | driver before, peak | local peak |
|---|---|---|---|---|---|---|---|
{many}

The size is that of the factors of a 17408 x 5120 module at rank 256; results carry them in the extraction, units in the
check. "Each" is the time on the clock from one result to the next, with two workers. The worker's time beyond is twice
that, less the local engine's: it counts a worker as busy while it waits, so it is the most that a unit can cost. Memory
is the resident one of the process, before these units and at its peak. To take one result while {waiting} units are
under way costs the driver {wait} ms.

## One unit

From a warm cache, the fastest of {runs}, one unit under way at a time, method `svd` at rank 256 in bf16. Reading both
sides is in it; the Ray column goes from handing the unit out to having its result, the next is the worker's part of it.

| shape | extract, 1 thread | 2 threads | Ray, 1 thread | of it the work | an element | check, 1 thread | Ray |
|---|---|---|---|---|---|---|---|
{units}

How far the peak resident memory of the worker rises above what it had before its first unit, in all and in bytes for
each element of the weight, beside what Ray is asked to set aside for it:

| shape | extract | an element | asked | check | an element | asked |
|---|---|---|---|---|---|---|
{memory}

The process itself, with torch imported, has {imported} MB before the first extraction and {checker} MB before the first
check, which also imports transformers and PEFT; Ray is asked for {process} MB for it, which the columns leave out.
Comparing tensors of {part} MB a side took {comparing} MB.

Other methods and dtypes take other memory, which this run did not measure.

## Bytes

| | GB/s |
|---|---|
| comparing equal tensors, bytes of both sides, local engine, one thread | {compared} |
| the same in a Ray task | {remote} |
| hashing, two files at a time | {hashed} |
| weighing a tensor that is left out or carried, bytes of both sides, one thread | {weighing} |
| keeping factors on the driver's disk, synced and hashed | {written} |
| streaming from a local Hub over the loopback, one reader | {streamed} |

All from a warm cache. The local Hub is a Python process on the same two processors: its figure says what one reader can
take in at least, and nothing of a network.

## From which size a unit is worth a task

A worker's time beyond its work is {task} ms for a unit and {megabyte} ms for each MB of its result. A line through the
work of the smallest and the largest shape above gives {module} s for any module and {each} ns for each element. With
factors of 2 x 256 x 2m bytes, the first is below 1 % of the second for square weights from **{side} x {side}** on:
{seconds} s of work, {size} MB of each side. Smaller ones cost more in proportion and little in total; the comparison
hands out tensors in groups of 256 MB for that reason.

## Where Ray pays

n modules take n x t on one machine, and s + ceil(n / w) x (u + c) on w workers: t is the seconds of a module on the
local engine, u the work in a Ray task, c the worker's time beyond it, s the time until the first worker answers. If t
is more than (u + c) / w, the cluster is quicker from some n on; otherwise never. That n, with workers that are like one
processor of this machine, against a local engine of one thread and of two (for one thread the quicker of t and u, which
are the same work and differ by what else the machine does):

| shape | Ray is | w | n, 1 thread | n, 2 threads |
|---|---|---|---|---|
{pays}

Start means that Ray is started on this machine for the run, join that a cluster is there. Eight workers were not run: u
and c are those of two.

## Extrapolated: which models

**All that follows is an extrapolation from the figures above; none of it was run.** Both sides are in bf16, every
linear of the layers has changed and is adapted at rank 256, no file is equal on both sides, and embeddings and head are
equal.

| model | parameters, 10⁹ | adapted linears | share of the parameters | largest |
|---|---|---|---|---|
{models}

- 27B: the shapes of Qwen3.6-27B, 64 layers.
- 405B: the shapes of Llama 3.1 405B, 126 dense layers.
- 1T: the shapes of Kimi K2 as if stored in bf16: 61 layers, 60 of which have 384 experts of 2048 x 7168 and a shared
  one.

What becomes of the experts decides the 1T case ([inputs.md](inputs.md)). "Experts as linears" needs a class that keeps
a linear for each expert. Where the model class holds them in fused tensors, changed experts are refused: leave them
out, or carry them whole where they are stored fused. Carrying puts all changed ones into the adapter, up to 2 TB.
To say what share of the update such a tensor is, both sides of it are weighed, block by block and a tensor a task: that
is {left} of one core for all experts at the rate above. What is carried is then read and written by the driver.
"Experts equal" is neither, and then a model of 1T has less to extract than one of 27B: its work is reading.

## Extrapolated: bytes read

| model | hash | compare | extract | check |
|---|---|---|---|---|
{reads}

Both sides together. A changed tensor is compared up to the first block that differs, 2 MiB of it. **Tensors in files of
equal digest are not read by the comparison**: where a release keeps the shards of its base as they are, all that is in
unchanged shards costs nothing. Of 1T with experts equal, that could be nearly all.

The driver alone hashes, each file of a folder once as long as it does not change, and likewise what it has downloaded.
With `--stream`, digests are the Hub's own and nothing is hashed. Extraction and check read the changed tensors, once
each.

## Extrapolated: what is needed

| model | extract, 1 core | check, 1 core | worker's memory | asked of Ray | through the driver | waiting | disk |
|---|---|---|---|---|---|---|---|
{needs}

- Worker's memory: the bytes for each element of the largest shape measured, times the largest weight, and the process.
- Through the driver: factors come back from the extraction and go out again for the check.
- Waiting, with 512 workers: the engine keeps two units under way for each. If the driver is slower than the workers,
  this much may lie in the cluster's object stores, or be spilled to disk by Ray.
- Disk, of the driver: kept modules, the adapter, and exports for llama.cpp (float32) and MLX; without exports two
  fifths of it. Not in it: checkpoints that are downloaded rather than streamed, the bytes of the hash column.

## Extrapolated: time, and what limits it

Comparing, extracting and checking, one after the other, with storage or network that gives all machines together so
many bytes a second. Both figures are assumptions; with `--stream` it is the way to the Hub. Hashing comes before that,
on the driver, whatever w is; `--stream` saves it. Each stage takes as long as its slowest part, which is the least: a
task reads before it computes. Named is the part that most of the time is due to.

| model | storage | hashing | w = 1 | w = 8 | w = 64 | w = 512 |
|---|---|---|---|---|---|---|
{times}

- **arithmetic**: more workers help. A worker is one core like this machine's: {module} s for each module and {each} ns
  for each element of the extraction, {check_module} s and {check_each} ns of the check, and the way through Ray.
  Another processor has other figures, and those of a GPU were not measured.
- **storage**: more workers do not help. 64 of them compare {reading} GB/s.
- **largest module**: one module is one unit; more threads or a GPU for each worker help.
- **driver**: it hands out units and takes and writes factors, at the costs above. The logits, which the driver compares
  where the model in float32 fits into its memory, are not in the table.

Of a verification nothing was measured beyond one machine. A replica holds the whole model: weights alone, in bf16, with
nothing for activations and cache, on GPUs that are assumed to have 80 or 141 GB:

| model | weights | GPUs of 80 GB | GPUs of 141 GB |
|---|---|---|---|
{gpus}

A replica is spread over the GPUs of one node (`--model-gpus`), never over several nodes: where no node has so many, the
model cannot be verified. A node that answers has the checkpoints in its cache, the bytes of the hash column.
"""
