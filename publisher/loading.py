"""Loading an adapter with PEFT, strictly: whatever PEFT passes over with a warning, or silently, is a problem.

The model class is built from its configuration alone, on the meta device, so that an adapter for a model of any
size is judged in its own size. Works on a local folder and on a Hub repository at a commit alike.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from huggingface_hub import hf_hub_download
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from publisher.adapter import KEY_PREFIX
from publisher.artefacts import ADAPTER
from publisher.errors import ValidationError
from publisher.records import ModuleExtraction


@dataclass(frozen=True, slots=True)
class Adapter:
    """Where an adapter is: a local folder, or a repository with subfolder and commit."""

    place: Path | str
    subfolder: str = ""
    revision: str | None = None

    @property
    def weights(self) -> Path:
        """Its tensors' file."""
        if isinstance(self.place, Path):
            return self.place / self.subfolder / ADAPTER
        return Path(hf_hub_download(self.place, ADAPTER, subfolder=self.subfolder or None, revision=self.revision))


def loading_problems(
    model_class: str, modules: Sequence[ModuleExtraction], *, config: Path, adapter: Adapter
) -> list[str]:
    """What keeps PEFT from putting every tensor of the file into the model, and nothing else, at scaling 1.

    Raises:
        ValidationError: transformers has no such class, or PEFT refuses the adapter altogether.
    """
    shapes = {module.name: module.shape for module in modules}
    loaded, problems = load_on_config(model_class, shapes, config=config, adapter=adapter)
    return problems + (list(_scaling_problems(loaded)) if loaded is not None else [])


def load_on_config(
    model_class: str, shapes: Mapping[str, tuple[int, int]], *, config: Path, adapter: Adapter
) -> tuple[Any | None, list[str]]:
    """The adapted model without the base's weights, and what of the adapter did not get there.

    There is no model where the class lacks one of the modules. With low_cpu_mem_usage, a parameter that the file does
    not reach shows by staying on the meta device.

    Args:
        model_class: a class of transformers.
        shapes: (out, in) of each module that the adapter is for, by name.
        config: the folder with the base's config.json.
        adapter: at any scaling.

    Raises:
        ValidationError: transformers has no such class, it is not for this configuration, or PEFT refuses the
            adapter altogether.
    """
    model = empty_model(model_class, configuration(config))
    lost = stand_in(model, shapes)
    if lost:
        return None, [f"{name} is no linear module of {model_class}" for name in lost]
    loaded, problems = load_adapter(model, adapter, low_cpu_mem_usage=True)
    tensors = load_file(adapter.weights)
    parameters = dict(_adapter_parameters(loaded))
    problems += [f"{name} is a parameter without a tensor in the file" for name in sorted(parameters.keys() - tensors)]
    problems += [f"{name} is in the file and reaches no parameter" for name in sorted(tensors.keys() - parameters)]
    for name in sorted(parameters.keys() & tensors):
        problems += _parameter_problems(name, parameters[name], tensor=tensors[name])
    return loaded, problems


def _adapter_parameters(loaded: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What PEFT put into the model, by the names that its file has for it; a shared weight under each of its names."""
    for name, parameter in loaded.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".modules_to_save." in name:
            yield name.replace(".modules_to_save.", ".").replace(".default.", "."), parameter


def class_named(name: str) -> Any:
    """The model class of that name in transformers.

    Raises:
        ValidationError: the installed transformers has none.
    """
    found = getattr(transformers, name, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValidationError(
            f"transformers {transformers.__version__} has no model class {name}",
            expected="a model_class that the installed transformers knows",
            next_step="correct model_class in the manifest, or: pip install --upgrade transformers",
        )
    return found


def empty_model(model_class: str, config: Any) -> Any:
    """The model without weights. A class for another configuration would build another model, or fail in its depths."""
    found = class_named(model_class)
    if not isinstance(config, found.config_class):
        raise ValidationError(
            f"{model_class} is not for the base's config.json, which is a {type(config).__name__}",
            expected=f"{' or '.join(config.architectures or ()) or 'the class it was saved from'}, as config.json says",
            next_step="correct model_class in the manifest",
        )
    with torch.device("meta"):
        return found._from_config(config)  # noqa: SLF001 - transformers' own way to build from a config


def configuration(folder: Path) -> Any:
    """The model's configuration, from config.json in this folder."""
    return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def load_adapter(model: Any, adapter: Adapter, *, low_cpu_mem_usage: bool = False) -> tuple[Any, list[str]]:
    """The model with the adapter loaded as a user loads it, and what PEFT complains about."""
    extra = {name: value for name, value in _hub_arguments(adapter).items() if value}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loaded = peft.PeftModel.from_pretrained(model, adapter.place, low_cpu_mem_usage=low_cpu_mem_usage, **extra)
        except (ValueError, RuntimeError, KeyError) as error:
            raise ValidationError(
                f"PEFT cannot load {adapter.place} on {type(model).__name__}: {_one_line(error)}",
                expected="an adapter for this model class",
                next_step="correct model_class in the manifest to the class whose tensor names the checkpoint has",
            ) from error
    return loaded, [_one_line(entry.message) for entry in caught if _is_complaint(entry)]


def merged_by_peft(weight: torch.Tensor, *, b: torch.Tensor, a: torch.Tensor, safe: bool) -> torch.Tensor:
    """What PEFT's own `merge_and_unload` makes of one weight (m, n) and its factors (m, r), (r, n), at a scaling of 1.

    `safe`: with `safe_merge=True`, by which PEFT rounds the update to the weight's dtype before it is added.
    """
    rank = a.shape[0]
    alone = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
    alone[0].weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    settings = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["0"], init_lora_weights=False)
    adapted = peft.get_peft_model(alone, settings)
    layer = adapted.base_model.model[0]
    layer.lora_A["default"].weight.data = a.float()
    layer.lora_B["default"].weight.data = b.float()
    merged: torch.Tensor = adapted.merge_and_unload(safe_merge=safe)[0].weight.data
    return merged


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bar, loading report and hints on speed: what matters of them is checked here."""
    level = transformers.logging.get_verbosity()
    bar = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bar:
            transformers.logging.enable_progress_bar()


def _hub_arguments(adapter: Adapter) -> dict[str, str | None]:
    return {"subfolder": adapter.subfolder, "revision": adapter.revision}


def stand_in(model: Any, shapes: Mapping[str, tuple[int, int]]) -> list[str]:
    """Give each target module a weight on the CPU that has a shape and no memory: PEFT puts adapters beside it.

    Returns the names that are no linear modules of this model.
    """
    there = dict(model.named_modules())
    lost = [name for name in shapes if not isinstance(there.get(name), torch.nn.Linear | Conv1D)]
    for name in shapes.keys() - set(lost):
        there[name].weight = torch.nn.Parameter(torch.zeros(1).expand(shapes[name]), requires_grad=False)
    return lost


def _parameter_problems(name: str, parameter: torch.Tensor, *, tensor: torch.Tensor) -> Iterator[str]:
    if parameter.is_meta:
        yield f"{name} was left on the meta device"
    elif not torch.equal(parameter.float(), tensor.float()):
        yield f"{name} does not hold the file's values once loaded"


def _scaling_problems(loaded: Any) -> Iterator[str]:
    for name, layer in loaded.named_modules():
        if isinstance(layer, LoraLayer) and layer.scaling["default"] != 1.0:
            yield f"{name.removeprefix(KEY_PREFIX)} has scaling {layer.scaling['default']} instead of 1"


def _is_complaint(entry: warnings.WarningMessage) -> bool:
    # Of a linear module beside Conv1D, PEFT remarks that it decides the orientation by the module's class: rightly.
    orientation = str(entry.message).startswith("fan_in_fan_out is set to True but")
    return issubclass(entry.category, UserWarning | RuntimeWarning) and not orientation


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:400]
