"""Modules that an adapter holds whole because a LoRA cannot: PEFT's modules_to_save.

The manifest's `adapter.carry` names them, or leaves the choice to this tool (`auto`). The head of a classifier is one
of them in any case, since PEFT asks for it in the file of an adapter of such a task type.

PEFT replaces a module with all its tensors, so a bias brings its weight along. It refuses a parameter that stands
beside further modules (Mamba's `A_log`): to replace its module would replace those too. A module that the fine-tune has
otherwise than the class has it is refused here: the class could not take it in.
"""

from collections.abc import Collection, Mapping, Sequence

from publisher.checkpoints.headers import TensorHeader
from publisher.errors import ExtractionError, listed
from publisher.extraction.model_structure import Structure
from publisher.extraction.tensor_names import module_of


def modules_to_save(
    chosen: Sequence[str], heads: Collection[str], tuned: Mapping[str, TensorHeader], *, structure: Structure
) -> dict[str, tuple[str, ...]]:
    """Find the modules of the tensors that are to be stored whole.

    Args:
        chosen: names of these tensors; those of heads may be among them.
        heads: modules that are stored whole in any case.
        tuned: the headers of the merged fine-tune, by the class's names.
        structure: of the model class.

    Returns:
        The modules by name, sorted; with each, all its tensors.

    Raises:
        ExtractionError: a tensor is a parameter that PEFT cannot carry alone, or the fine-tune has not the tensors of a
            module that the class has, in their shapes.
    """
    single = [name for name in chosen if not _is_within(name, heads)]
    stuck = [
        f"{name}, a parameter of {module_of(name) or 'the model itself'}"
        for name in single
        if not is_storable(name, structure)
    ]
    if stuck:
        raise ExtractionError(
            f"adapter.carry names parameters that PEFT cannot carry alone:\n{listed(stuck)}\n",
            expected="tensors of modules that hold no further modules, since PEFT replaces a module as a whole",
            next_step="name them under adapter.ignore instead, or publish the whole model",
        )
    modules = {module_of(name) for name in single} | set(heads)
    found = {module: _tensors(module, structure) for module in sorted(modules)}
    _require_fit(found, tuned, structure=structure)
    return found


def is_storable(name: str, structure: Structure) -> bool:
    """Return whether PEFT can store the module of this tensor whole: one that holds no further modules of weights."""
    module = module_of(name)
    holders = {module_of(parameter) for parameter in structure.names.parameters}
    return module in structure.every and bool(module) and not any(one.startswith(f"{module}.") for one in holders)


def _is_within(name: str, modules: Collection[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _tensors(module: str, structure: Structure) -> tuple[str, ...]:
    return tuple(sorted(name for name in structure.names.parameters if name.startswith(f"{module}.")))


def _require_fit(
    found: Mapping[str, Sequence[str]], tuned: Mapping[str, TensorHeader], *, structure: Structure
) -> None:
    """Require that the fine-tune has every tensor of these modules as the class has it, which takes them in."""
    problems = list[str]()
    for name in (name for tensors in found.values() for name in tensors):
        shape = tuple(structure.names.parameters[name].shape)
        if name not in tuned:
            problems.append(f"{name} is not in the source")
        elif tuned[name].shape != shape:
            problems.append(f"{name} is {tuned[name].shape} in the source and {shape} in {structure.model_class}")
    if problems:
        raise ExtractionError(
            f"modules that are to be stored whole do not fit the model class:\n{listed(problems)}\n",
            expected="the tensors of the class's modules, since PEFT puts the stored ones in their place",
            next_step="correct model_class, base or adapter.task_type in the manifest, or leave all tensors of these "
            "modules out under adapter.ignore",
        )
