"""Modules that an adapter holds whole because a LoRA cannot: PEFT's modules_to_save, named by `adapter.carry`.

PEFT replaces a module with all its tensors, so a bias brings its weight along. It refuses a parameter that stands
beside further modules (Mamba's `A_log`): to replace its module would replace those too. A module of which one side has
a tensor that the other lacks, or has in another shape, is refused here: the base's could not take it in.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ExtractionError, listed


def modules_to_save(
    chosen: Sequence[str],
    *,
    base: Mapping[str, TensorHeader],
    tuned: Mapping[str, TensorHeader],
) -> dict[str, tuple[str, ...]]:
    """Find the modules of the tensors that differ and that the manifest's `carry` selects.

    Args:
        chosen: names of these tensors.
        base: the base's headers, by tensor name.
        tuned: the headers of the merged fine-tune, by tensor name.

    Returns:
        The modules by name, sorted; with each, all its tensors.

    Raises:
        ExtractionError: a tensor is a parameter that PEFT cannot carry alone, or a tensor of a module is not the same
            kind on both sides.
    """
    modules = {module_of(name) for name in chosen}
    _require_leaves(chosen, tuned)
    _require_on_both_sides(modules, base=base, tuned=tuned)
    return {module: tuple(sorted(name for name in tuned if module_of(name) == module)) for module in sorted(modules)}


def module_of(name: str) -> str:
    """Return the module that this tensor is a parameter of."""
    return name.rpartition(".")[0]


def _require_leaves(chosen: Iterable[str], names: Iterable[str]) -> None:
    holders = {module_of(module_of(name)) for name in names}
    stuck = [
        f"{name}, a parameter of {module_of(name) or 'the model itself'}"
        for name in chosen
        if not module_of(name) or any(f"{holder}.".startswith(f"{module_of(name)}.") for holder in holders)
    ]
    if stuck:
        raise ExtractionError(
            f"adapter.carry names parameters that PEFT cannot carry alone:\n{listed(stuck)}\n",
            expected="tensors of modules that hold no further modules, since PEFT replaces a module as a whole",
            next_step="name them under adapter.ignore instead, or publish the whole model",
        )


def _require_on_both_sides(
    modules: Collection[str], *, base: Mapping[str, TensorHeader], tuned: Mapping[str, TensorHeader]
) -> None:
    """Require that the base's module has all tensors that are stored, and no others: it takes them in."""
    problems = [
        f"{name} is in the {'source' if name in tuned else 'base'} alone"
        for name in sorted(tuned.keys() ^ base.keys())
        if module_of(name) in modules
    ] + [
        f"{name} has another shape in the base"
        for name in sorted(tuned.keys() & base.keys())
        if module_of(name) in modules and tuned[name].shape != base[name].shape
    ]
    if problems:
        raise ExtractionError(
            f"adapter.carry names modules that differ in more than their values:\n{listed(problems)}\n",
            expected="modules with the same tensors in source and base, since the base's module takes the carried in",
            next_step="leave all tensors of these modules out under adapter.ignore, or publish the whole model",
        )
