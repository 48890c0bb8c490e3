"""Whether a model class can be called as PEFT wraps it and its modules: tried without weights, before long work."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import peft
import torch

from publisher.adapters.loading import configuration, empty_model
from publisher.adapters.model_inputs import InputError, Inputs, inputs_for
from publisher.checkpoints.files import read_config
from publisher.errors import ValidationError
from publisher.manifest.schema import Variant
from publisher.manifest.task_types import task_type_of

_WIDTH = 200  # characters of what PEFT or the class says


def require_task_type(variant: Variant, folder: Path) -> None:
    """Raise if the class runs by itself, and not as PEFT wraps it for the manifest's task type.

    The task type that `publish new` writes for the class is known to work. Another is tried on the meta device; where
    the class does not run there, nothing is known, and validation finds out.

    Args:
        variant: the manifest's entry.
        folder: with the base's config.json.

    Raises:
        ValidationError: PEFT or the class refuses; or transformers has no such class.
    """
    task = variant.adapter.task_type
    if task in (None, task_type_of(variant.model_class, read_config(folder))):
        return
    model = empty_model(variant.model_class, configuration(folder)).float().eval()
    inputs = _working_inputs(model)
    linear = next((name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)), None)
    if inputs is None or linear is None:
        return
    try:
        with torch.device("meta"):
            settings = peft.LoraConfig(r=1, target_modules=[linear], task_type=task)
            wrapped = peft.get_peft_model(model, settings, low_cpu_mem_usage=True)
        _run(wrapped, inputs)
    except Exception as error:
        raise ValidationError(
            f"{variant.label}: {variant.model_class} cannot be called as PEFT wraps it for task_type {task}: "
            f"{told(error)}",
            expected="a task type whose wrapper hands the class's own inputs on",
            next_step="leave adapter.task_type out of the manifest, or write what `publish new` writes for this class",
        ) from error


def callable_with(names: Collection[str], model_class: str, *, folder: Path) -> frozenset[str]:
    """Find the modules in whose place the class takes PEFT's wrapper: some read what a wrapper does not have.

    Whisper, for one, reads the stride of its convolutions.

    Args:
        names: of modules, such as tables and convolutions.
        model_class: a class of transformers.
        folder: with the base's config.json.

    Returns:
        Those with which it runs; none where it does not run on the meta device at all, and nothing is known.
    """
    if not names:
        return frozenset()
    model = empty_model(model_class, configuration(folder)).float().eval()
    inputs = _working_inputs(model)
    if inputs is None:
        return frozenset()
    if _runs_with(names, model, inputs):
        return frozenset(names)
    fresh = (empty_model(model_class, configuration(folder)).float().eval() for _ in names)
    return frozenset(name for name, model in zip(names, fresh, strict=True) if _runs_with([name], model, inputs))


def _runs_with(names: Collection[str], model: Any, inputs: Inputs) -> bool:
    with torch.device("meta"):
        settings = peft.LoraConfig(r=1, target_modules=list(names))
        wrapped = peft.get_peft_model(model, settings, low_cpu_mem_usage=True)
    return _runs(wrapped, inputs)


def told(error: Exception) -> str:
    """Return an error on one line; of a long one the end, since some begin with a whole model."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= _WIDTH else f'…{text[-_WIDTH:]}'}"


def _working_inputs(model: Any) -> Inputs | None:
    """Return the first inputs on which the model runs without weights; None where it does not."""
    try:
        for made in inputs_for(model):
            inputs = {name: tensor.to("meta") for name, tensor in made.items()}
            if _runs(model, inputs):
                return inputs
    except InputError:
        pass
    return None


def _runs(model: Any, inputs: Inputs) -> bool:
    try:
        _run(model, inputs)
    except Exception:  # noqa: BLE001 - a class may raise anything over inputs that are not its own
        return False
    return True


def _run(model: Any, inputs: Inputs) -> None:
    with torch.inference_mode():
        model(**inputs)
