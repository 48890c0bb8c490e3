"""Tables and convolutions of which the change has a low rank, so that factors hold it in less than what it is else.

PEFT adapts both. Whether the change has a low rank is seen in its decomposition alone, which is made here once more
than for the adapter: such modules are few.
"""

from collections.abc import Mapping

from publisher.adapters.task_type_check import callable_with
from publisher.checkpoints.pairs import CheckpointPair
from publisher.engines import Engine
from publisher.extraction.module import Extracting
from publisher.extraction.tensor_names import module_of
from publisher.manifest.schema import AdapterSettings
from publisher.records.extraction import APPROXIMATE, ModuleFigures
from publisher.records.progress import Progress


def low_rank(
    stored: Mapping[str, int],
    *,
    both: CheckpointPair,
    model_class: str,
    settings: AdapterSettings,
    engine: Engine,
    progress: Progress,
) -> frozenset[str]:
    """Find the weights of which factors hold the whole change, are smaller, and let the class run.

    Args:
        stored: the weights by name, with the elements that storing the change otherwise takes.
        both: base and tuned, open for reading.
        model_class: of transformers, which is tried with PEFT's wrappers.
        settings: the manifest's `adapter`, of which the rank is used.
        engine: where the arithmetic is done.
        progress: called for each weight.

    Returns:
        Names among these: the factors leave no more than the merge's rounding explains.

    Raises:
        ExtractionError: NaN or infinity in a weight, or values so large that the figures overflow.
        EngineError: the cluster fails.
    """
    modules = {module_of(name): name for name in stored}
    names = [modules[one] for one in callable_with(modules, model_class, folder=both.snapshots.base.folder)]
    found = list[str]()

    def report(what: str) -> None:
        progress(what, len(found), len(names))

    job = Extracting(both.snapshots, settings)
    with engine.run(job, map(both.tensors, sorted(names)), report=report) as results:
        found = [pair.name for pair, module in results if _is_held(module.figures, otherwise=stored[pair.name])]
    return frozenset(found)


def _is_held(figures: ModuleFigures, *, otherwise: int) -> bool:
    """Return whether factors hold the whole change, in fewer elements than it takes otherwise."""
    is_whole = figures.ratio is not None and figures.ratio <= APPROXIMATE and not figures.rank_at_least
    return 0 < figures.rank * sum(figures.shape) < otherwise and is_whole
