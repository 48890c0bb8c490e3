"""What only the model class knows of a pair: which weights are stored transposed, and which modules share one.

Names and shapes tell nearly always enough, and then nothing heavy is imported. The class, built on the meta device
from config.json, is asked where they leave a doubt: a weight whose bias fits its columns (GPT-2's Conv1D), numbered
experts, which classes of transformers may hold fused, Mamba, where PEFT refuses some modules, modules carried
whole, or a class other than the one that was saved. It refuses changed weights that are no linear module of the
class, or none that PEFT takes, with their share of the update.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from publisher.checkpoints.files import read_config
from publisher.checkpoints.headers import TensorHeader
from publisher.checkpoints.pairs import CheckpointPair
from publisher.engines import Engine
from publisher.errors import ExtractionError, counted, listed
from publisher.extraction.comparison import Comparison, compare, shares, weighed
from publisher.manifest.schema import Variant
from publisher.records.extraction import Carried
from publisher.records.progress import Progress

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Structure:
    """Modules of a class by name.

    Attributes:
        every: all of them.
        linear: weights are (out, in).
        transposed: weights are (in, out), as in transformers' Conv1D.
        refused: linear modules that PEFT takes no LoRA for.
        tied: for a module that shares its weight, the others that do.
        shapes: (out, in) of each linear module's weight, however it is stored.
    """

    every: frozenset[str]
    linear: frozenset[str]
    transposed: frozenset[str]
    refused: frozenset[str]
    tied: Mapping[str, tuple[str, ...]]
    shapes: Mapping[str, tuple[int, int]]


def compared(variant: Variant, both: CheckpointPair, *, engine: Engine, progress: Progress) -> Comparison:
    """What differs between source and base, by headers and bytes and, where there is reason, by the model class.

    Args:
        variant: the manifest's entry.
        both: base and tuned, open for reading.
        engine: what reads and compares.
        progress: told of each tensor.

    Raises:
        ExtractionError, ValidationError: as `compare` and `judged`.
    """
    settings = variant.adapter
    seen = compare(both, ignore=settings.ignore, carry=settings.carry, engine=engine, progress=progress)
    weigh = partial(weighed, both, engine=engine, progress=progress)
    return judged(seen, variant.model_class, both=both, weigh=weigh)


def judged(
    seen: Comparison, model_class: str, *, both: CheckpointPair, weigh: Callable[[Sequence[str]], Mapping[str, float]]
) -> Comparison:
    """The comparison with what the class adds to it, where there is reason to ask.

    Args:
        seen: what the checkpoints tell.
        model_class: the manifest's.
        both: base and tuned; the base's folder has its config.json.
        weigh: gives the squares of the update in tensors, for a message.

    Raises:
        ExtractionError: changed weights are no linear modules of the class.
        ValidationError: transformers has no such class, or it is not for this configuration.
    """
    headers, base = both.headers.tuned, both.snapshots.base.folder
    if not (seen.carried or in_doubt(seen.changed, headers, config=read_config(base), model_class=model_class)):
        return seen
    found = structure_of(model_class, base)
    modules = {name: name.removesuffix(".weight") for name in seen.changed}
    lost = [name for name, module in modules.items() if module not in found.linear | found.transposed]
    lost += [name for module in seen.carried for name in module.tensors if module.module not in found.every]
    if lost:
        every = list(dict.fromkeys([*seen.changed, *lost]))
        raise _not_in_class(lost, shares(lost, weigh(every)), model_class=model_class)
    barred = [name for name, module in modules.items() if module in found.refused]
    if barred:
        raise _refused_by_peft(barred, shares(barred, weigh(seen.changed)), model_class=model_class)
    return replace(
        seen,
        carried=tuple(_with_tied(module, found) for module in seen.carried),
        transposed=frozenset(name for name, module in modules.items() if module in found.transposed),
    )


def in_doubt(
    changed: Sequence[str], headers: Mapping[str, TensorHeader], *, config: Mapping[str, Any], model_class: str
) -> bool:
    """Whether names and shapes alone may mislead."""
    architectures = config.get("architectures")
    other_class = isinstance(architectures, list) and model_class not in architectures
    experts = any(_EXPERT.search(name) for name in changed)
    mamba = "mamba" in str(config).lower()
    return other_class or experts or mamba or any(_looks_transposed(name, headers) for name in headers)


def _looks_transposed(name: str, headers: Mapping[str, TensorHeader]) -> bool:
    weight, bias = headers[name], headers.get(f"{name.removesuffix('.weight')}.bias")
    if bias is None or not name.endswith(".weight") or len(weight.shape) != 2:  # noqa: PLR2004 - rows and columns
        return False
    rows, columns = weight.shape
    return bias.shape == (columns,) and rows != columns


def _refused_by_peft(barred: Sequence[str], told: Mapping[str, str], *, model_class: str) -> ExtractionError:
    return ExtractionError(
        f"PEFT takes no LoRA for {counted(len(barred), 'changed module')} of {model_class}:\n"
        + listed(f"{name}, {told[name]}" for name in barred)
        + "\n",
        expected="changes in modules that PEFT adapts",
        next_step="in the manifest, name them under adapter.carry to store them whole, or under adapter.ignore to "
        "leave them out knowingly",
    )


def _not_in_class(lost: Sequence[str], told: Mapping[str, str], *, model_class: str) -> ExtractionError:
    return ExtractionError(
        f"{model_class} has no module for {counted(len(lost), 'changed tensor')} of the checkpoint:\n"
        + listed(f"{name}, {told[name]}" for name in lost)
        + "\n",
        expected="weights of the class's own modules, since PEFT finds its places by their names",
        next_step="correct model_class in the manifest if another class was saved; experts that the class holds fused "
        "in one tensor cannot be carried yet: name them under adapter.ignore to leave them out knowingly",
    )


def _with_tied(carried: Carried, found: Structure) -> Carried:
    tied = found.tied.get(carried.module, ())
    return carried.model_copy(update={"tied": tied, "parameters": carried.parameters * (1 + len(tied))})


def structure_of(model_class: str, folder: Path) -> Structure:
    """Of the class, built without weights from config.json in this folder.

    Raises:
        ValidationError: transformers has no such class, or it is not for this configuration.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    from publisher.adapters.loading import configuration, empty_model, quiet

    with quiet():
        model = empty_model(model_class, configuration(folder))
        modules = dict(model.named_modules())
    sharing: dict[int, list[str]] = {}
    for name, module in modules.items():
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter):
            sharing.setdefault(id(weight), []).append(name)
    linear = frozenset(name for name, module in modules.items() if isinstance(module, torch.nn.Linear))
    transposed = frozenset(name for name, module in modules.items() if isinstance(module, Conv1D))
    return Structure(
        every=frozenset(modules),
        linear=linear,
        refused=frozenset(name for name in linear if _is_refused(model, name)),
        transposed=transposed,
        tied={name: tuple(other for other in group if other != name) for group in sharing.values() for name in group},
        shapes={name: tuple(modules[name].weight.shape) for name in linear}
        | {name: tuple(reversed(modules[name].weight.shape)) for name in transposed},
    )


def _is_refused(model: Any, name: str) -> bool:
    """PEFT's own judgement, which it gives when it puts an adapter in."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    try:
        LoraModel._check_target_module_compatiblity(model, LoraConfig(), model, name.rpartition(".")[2])  # noqa: SLF001 - asked nowhere else before the adapter is there
    except ValueError:
        return True
    return False
