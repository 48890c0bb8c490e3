"""Loading an adapter with PEFT, strictly: whatever PEFT passes over with a warning, or silently, is a problem.

The model class is built from its configuration alone, on the meta device, so that an adapter for a model of any
size is judged in its own size. Works on a local folder and on a Hub repository at a commit alike.

Neither library sees a file of others as it is: transformers gets a checked copy of config.json, PEFT a folder with the
reduced adapter_config.json, whose patterns have become names, and a link to the tensors. Whatever either of them raises
is one ValidationError.
"""

import contextlib
import json
import logging
import math
import re
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import peft
import torch
import transformers
from huggingface_hub import hf_hub_download
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from publisher.adapters.wrappers import (
    ExpertPlace,
    applies_to_parameters,
    expert_places,
    wrapper_keys,
    wrapper_problems,
)
from publisher.border.adapterconfig import ALL_LINEAR, reduced, resolved, targeted
from publisher.border.limits import LIMITS
from publisher.border.modelconfig import bounded_config, bounded_modules, readable_quantisation
from publisher.checkpoints.files import MODEL_CONFIG, read_config, read_json
from publisher.checkpoints.headers import file_headers, read_headers
from publisher.checkpoints.wrappers import key_mapping
from publisher.errors import PublisherError, ValidationError, shown
from publisher.records.extraction import KEY_PREFIX, ExpertTensor, ModuleExtraction
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG


@dataclass(frozen=True, slots=True)
class AdapterLocation:
    """Where an adapter is: a local folder, or a repository with subfolder and commit."""

    place: Path | str
    subfolder: str = ""
    revision: str | None = None

    @property
    def weights(self) -> Path:
        """The file of its tensors."""
        return self._file(ADAPTER)

    @property
    def config(self) -> Path:
        """The file of its configuration, adapter_config.json."""
        return self._file(ADAPTER_CONFIG)

    def _file(self, name: str) -> Path:
        if isinstance(self.place, Path):
            return self.place / self.subfolder / name
        return Path(hf_hub_download(self.place, name, subfolder=self.subfolder or None, revision=self.revision))


def loading_problems(
    model_class: str,
    modules: Sequence[ModuleExtraction],
    *,
    config: Path,
    adapter: AdapterLocation,
    experts: Sequence[ExpertTensor] = (),
) -> list[str]:
    """Return what keeps PEFT from putting every tensor of the file into the model, and nothing else, at scaling 1.

    Args:
        model_class: a class of transformers.
        modules: that the adapter is for.
        config: the folder with the base's config.json.
        adapter: of any origin.
        experts: the parameters of experts that the adapter is for.

    Returns:
        A line for each problem.

    Raises:
        ValidationError: transformers has no such class, or PEFT refuses the adapter altogether.
    """
    names = [module.name for module in modules]
    loaded, problems = load_on_config(model_class, names, config=config, adapter=adapter)
    if loaded is None:
        return problems
    unknown = [f"{name} is adapted and not in the evidence" for name in sorted(_adapted(loaded) - {*names})]
    return [*problems, *unknown, *_scaling_problems(loaded), *wrapper_problems(loaded, experts)]


def _adapted(loaded: Any) -> set[str]:
    """Return the names of the modules that PEFT has adapted as modules."""
    layers = ((name, layer) for name, layer in loaded.named_modules() if isinstance(layer, LoraLayer))
    return {name.removeprefix(KEY_PREFIX) for name, layer in layers if not isinstance(layer, ParamWrapper)}


def load_on_config(
    model_class: str, adapted: Collection[str] = (), *, config: Path, adapter: AdapterLocation
) -> tuple[Any | None, list[str]]:
    """Load the adapter into the model without the base's weights.

    There is no model where the class lacks one of the modules. With low_cpu_mem_usage, a parameter that the file does
    not reach shows by staying on the meta device.

    Args:
        model_class: a class of transformers.
        adapted: names that have to be modules of the class of kinds that PEFT adapts.
        config: the folder with the base's config.json.
        adapter: at any scaling.

    Returns:
        The adapted model, or None where the class lacks a module; and a line for each tensor of the adapter that did
        not get there.

    Raises:
        ValidationError: transformers has no such class, it is not for this configuration, or PEFT refuses the
            adapter altogether.
    """
    model = empty_model(model_class, configuration(config, labels=labels_in(adapter)))
    there = dict(model.named_modules())
    lost = [name for name in adapted if not isinstance(there.get(name), _ADAPTED)]
    if lost:
        return None, [f"{name} is no module of {model_class} that PEFT adapts" for name in lost]
    stand_in(model)
    loaded, problems = load_adapter(model, adapter, empty=True)
    tensors = load_file(adapter.weights)
    problems += [f"{name} is in the file and reaches no parameter" for name in passed_over(loaded, adapter)]
    for name, parameter in adapter_parameters(loaded):
        problems += _parameter_problems(name, parameter, tensor=tensors.get(name))
    return loaded, problems


def adapter_parameters(loaded: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what PEFT put into the model, by the names that its file has; a shared weight under each of its names."""
    for name, parameter in loaded.named_parameters(remove_duplicate=False):
        if ".lora_" in name or ".modules_to_save." in name:
            plain = name.replace(".modules_to_save.", ".").replace(".default.", ".")
            dora = ".lora_magnitude_vector." in plain
            yield plain.removesuffix(".weight" if dora else ".default"), parameter


def passed_over(loaded: Any, adapter: AdapterLocation) -> list[str]:
    """Return the names of the file's tensors that PEFT has no place for in the model that it has loaded them into.

    `from_pretrained` keeps them to itself; what it calls tells them to whoever calls it again. Layers that PEFT has
    replicated without memory are on the meta device again, and so would be the factors beside them.
    """
    stand_in(loaded)
    seen = peft.set_peft_model_state_dict(loaded, load_file(adapter.weights), low_cpu_mem_usage=True)
    return sorted(name.replace(".default.", ".") for name in seen.unexpected_keys)


def class_named(name: str) -> Any:
    """Return the model class of that name in transformers.

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
    """Return the model without weights, on the meta device.

    A class for another configuration would build another model, or fail deep inside.

    Raises:
        ValidationError: transformers has no such class, it is not for this configuration, or it cannot be built.
    """
    found = class_named(model_class)
    if not isinstance(config, found.config_class):
        raise ValidationError(
            f"{model_class} is not for the base's config.json, which is a {type(config).__name__}",
            expected=f"{' or '.join(config.architectures or ()) or 'the class it was saved from'}, as config.json says",
            next_step="correct model_class in the manifest",
        )
    what = f"{model_class} of the base's config.json"
    with _one_error(f"{what} cannot be built"), _no_downloads(), bounded_modules(what), torch.device("meta"):
        return found._from_config(config)  # noqa: SLF001 - transformers' own way to build from a config


def whole_model(model_class: str, folder: Path, *, labels: int | None = None) -> Any:
    """Return the model with the weights in this folder, in float32.

    Args:
        model_class: a class of transformers.
        folder: of the checkpoint.
        labels: of the head, where the checkpoint has another one or none.

    Returns:
        The model, for inference.

    Raises:
        FetchError: there is no readable config.json.
        ValidationError: transformers has no such class, or refuses the folder.
    """
    config, found = configuration(folder, labels=labels), class_named(model_class)
    if (quantisation := readable_quantisation(read_config(folder))) is not None:
        config.quantization_config = quantisation
    what = f"{model_class} in {folder}"
    with _one_error(f"{what} cannot be loaded"), _no_downloads(), bounded_modules(what):
        loaded = found.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=labels is not None,
            key_mapping=key_mapping(read_headers(folder)),
        )
        return loaded.eval()


def configuration(folder: Path, *, labels: int | None = None) -> Any:
    """Return the model's configuration, from config.json in this folder.

    Args:
        folder: of the checkpoint.
        labels: how many the head has, where config.json says otherwise.

    Returns:
        The configuration of transformers.

    Raises:
        FetchError: there is no readable config.json.
        ValidationError: a value in it is beyond its limit, or transformers cannot make a configuration of it.
    """
    file = folder / MODEL_CONFIG
    checked = bounded_config(read_config(folder), file=file)
    if not isinstance(checked.get("model_type"), str):
        raise ValidationError(
            f"{file}: model_type is {shown(checked.get('model_type'))}",
            expected="the name of a model type, as save_pretrained writes it",
            next_step="name the base's folder as transformers saved it",
        )
    with _one_error(f"transformers cannot read {file}"), tempfile.TemporaryDirectory() as scratch, _no_downloads():
        Path(scratch, MODEL_CONFIG).write_text(json.dumps(checked), encoding="utf-8")
        found = transformers.AutoConfig.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)
    found._name_or_path = str(folder)  # noqa: SLF001 - where transformers keeps it
    if labels is not None and labels != found.num_labels:
        found.num_labels = labels
    return found


def labels_in(adapter: AdapterLocation) -> int | None:
    """Return how many labels the head has that an adapter holds whole; None where it holds none.

    Raises:
        ValidationError: more than any head has.
    """
    found = [header.shape[0] for name, header in file_headers(adapter.weights).items() if _HEAD.search(name)]
    if found and not 0 < found[0] <= LIMITS.counts:
        raise ValidationError(
            f"{adapter.weights} has a head of {found[0]:,} labels", expected=f"at most {LIMITS.counts:,}"
        )
    return found[0] if found else None


@contextlib.contextmanager
def for_peft(adapter: AdapterLocation, model: Any) -> Iterator[tuple[Path, list[str]]]:
    """Give a folder that holds the adapter as PEFT may see it, and what is to be said of its patterns.

    Args:
        adapter: of any origin.
        model: that it is to be put into; its modules' names are what patterns can mean.

    Yields:
        The folder, which is removed afterwards, and a complaint for each key of a pattern that means no module.

    Raises:
        FetchError: a file is missing or cannot be read.
        PatternError, UncheckablePatternError: a pattern is none, or cannot be matched here.
        ValidationError: a field or the file of tensors is beyond its limit.
    """
    weights = adapter.weights
    found = reduced(read_json(adapter.config))
    _require_size(weights, found.fields)
    fields, complaints = resolved(found, [name for name, _ in model.named_modules() if name])
    _require_rows(weights, found.fields, model=model)
    config = {"peft_type": "LORA", "inference_mode": True} | fields
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        Path(scratch, ADAPTER).symlink_to(weights.resolve())
        yield Path(scratch), complaints


def _require_size(weights: Path, fields: Mapping[str, Any]) -> None:
    """Raise ValidationError for more tensors than are loaded, or ranks that no tensor of the file is as large as."""
    shapes = [header.shape for header in file_headers(weights).values()]
    size = weights.stat().st_size
    if size > LIMITS.adapter_bytes:
        raise ValidationError(
            f"{weights} has {size:,} bytes; at most {LIMITS.adapter_bytes:,} are loaded", expected="a LoRA adapter"
        )
    rank = max([fields.get("r", 1), *fields.get("rank_pattern", {}).values()])
    largest = max((extent for shape in shapes for extent in shape), default=0)
    if rank > max(largest, _DEFAULT_RANK):
        raise ValidationError(
            f"{ADAPTER_CONFIG} gives rank {rank:,}, and no tensor of {weights} has more than {largest:,} rows or "
            "columns",
            expected="the ranks of the tensors",
        )


def _require_rows(weights: Path, fields: Mapping[str, Any], *, model: Any) -> None:
    """Raise ValidationError where PEFT would make larger tensors beside the model's tables than the file holds."""
    tables = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    rank = max([fields.get("r", _DEFAULT_RANK), *fields.get("rank_pattern", {}).values()])
    adapted = [tables[name] for name in _targeted_tables(fields, list(tables))]
    made = sum(rank * (table.num_embeddings + table.embedding_dim) for table in adapted)
    indices = fields.get("trainable_token_indices") or []
    rows = sum(map(len, indices.values())) if isinstance(indices, dict) else len(indices)
    made += rows * max((table.embedding_dim for table in tables.values()), default=0)
    held = sum(math.prod(header.shape) for header in file_headers(weights).values())
    if made > max(held, _FEW_NUMBERS):
        raise ValidationError(
            f"{ADAPTER_CONFIG} asks for {made:,} numbers beside the model's tables, and {weights} holds {held:,}",
            expected="the ranks and token indices of the tensors",
        )


def _targeted_tables(fields: Mapping[str, Any], tables: Sequence[str]) -> list[str]:
    wanted = fields.get("target_modules")
    if wanted is None or (isinstance(wanted, str) and wanted.lower() == ALL_LINEAR):
        return []
    return targeted(fields, tables)


def load_adapter(model: Any, adapter: AdapterLocation, *, empty: bool = False) -> tuple[Any, list[str]]:
    """Return the model with the adapter loaded as a user loads it, and what PEFT complains about.

    Args:
        model: of the adapter's class.
        adapter: of any origin.
        empty: the model has no weights; parameters that the file does not reach stay on the meta device, and those
            that it reaches keep the file's dtype.

    Returns:
        The adapted model, and a line for each complaint.

    Raises:
        FetchError: a file is missing or cannot be read.
        ValidationError: PEFT refuses it, or may not see it (`for_peft`).
    """
    settings: dict[str, Any] = {"low_cpu_mem_usage": True, "autocast_adapter_dtype": False} if empty else {}
    with (
        warnings.catch_warnings(record=True) as caught,
        _one_error(f"PEFT cannot load {adapter.place} on {type(model).__name__}", next_step=_OTHER_BASE),
        for_peft(adapter, model) as (folder, complaints),
        _no_downloads(),
    ):
        warnings.simplefilter("always")
        loaded = peft.PeftModel.from_pretrained(model, folder, **settings)
    wrapped = frozenset(wrapper_keys(loaded))
    return loaded, complaints + [_one_line(entry.message) for entry in caught if _is_complaint(entry, wrapped)]


_ADAPTED = (torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_HEAD = re.compile(r"\.(score|classifier|classifier\.out_proj|qa_outputs)\.weight$")  # the last of a head's weights
_DEFAULT_RANK = 8  # PEFT's own, where adapter_config.json gives none
_FEW_NUMBERS = 1 << 26  # that PEFT may make beside a table, whatever the file holds
_OTHER_BASE = (
    "name the base, and its revision, that the adapter was made for; or correct model_class in the manifest to the "
    "class whose tensor names the checkpoint has"
)


@contextlib.contextmanager
def _one_error(what: str, *, next_step: str = "") -> Iterator[None]:
    """Turn whatever a library raises over files of any origin into one ValidationError with its cause."""
    try:
        yield
    except PublisherError:
        raise
    except Exception as error:
        told = _one_line(error)
        raise ValidationError(
            f"{what}: {type(error).__name__}{f': {told}' if told else ''}",
            expected="files that the installed libraries take",
            next_step=next_step,
        ) from error


@contextlib.contextmanager
def _no_downloads() -> Iterator[None]:
    """Keep the libraries off the network: what a configuration names is never fetched behind the reader's back."""
    before = huggingface_hub.constants.HF_HUB_OFFLINE
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        huggingface_hub.constants.HF_HUB_OFFLINE = before


def merged_by_peft(weight: torch.Tensor, *, b: torch.Tensor, a: torch.Tensor, safe: bool) -> torch.Tensor:
    """Merge one weight by PEFT's own `merge_and_unload`, at a scaling of 1.

    Args:
        weight: the base's weight (m, n).
        b: factor (m, r).
        a: factor (r, n).
        safe: with `safe_merge=True`, by which PEFT rounds B A to the weight's dtype before it is added.

    Returns:
        The merged weight (m, n), in the dtype of `weight`.
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
    """Keep transformers' bar, loading report and hints on speed off the terminal for as long as the block runs.

    What matters of them is checked here.
    """
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


_OF_ADAPTERS = (".lora_", ".modules_to_save.", ".trainable_tokens_")


def stand_in(model: Any) -> None:
    """Give each parameter a stand-in on the CPU that has its shape and no memory; a shared one stays shared.

    On the meta device PEFT leaves an adapter where the base is, and fails on what reads the base's rows or copies it.
    An adapter's own parameters are left where they are: whether the file reaches them shows by that. Stand-ins are in
    float32, since PEFT casts the factors to the dtype of what they lie beside.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta or any(kind in name for kind in _OF_ADAPTERS):
            continue
        there = torch.nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=False)
        holder, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(holder), leaf, made.setdefault(id(parameter), there))


def parameter_keys(model_class: str, names: Sequence[str], *, config: Path) -> dict[str, tuple[str, str]]:
    """Return under which names PEFT saves the factors of these parameters, from a fresh wrapper without weights.

    Wrappers of two parameters of one module nest, so that each name depends on all of them.

    Args:
        model_class: a class of transformers.
        names: full names of parameters, all that the adapter is for.
        config: the folder with the base's config.json.

    Returns:
        The keys of A and B in the adapter's file, by parameter.

    Raises:
        ValidationError: transformers has no such class, or PEFT takes no LoRA for one of these parameters.
    """
    keys = {name: place.keys for name, place in parameter_places(model_class, names, config=config).items()}
    lost = [name for name in names if name not in keys]
    if lost:
        raise ValidationError(
            f"PEFT takes no LoRA for {', '.join(lost[:4])} of {model_class}",
            expected="parameters of the class's own modules",
            next_step="name them under adapter.ignore to leave them out knowingly",
        )
    return {name: keys[name] for name in names}


def parameter_places(model_class: str, entries: Sequence[str], *, config: Path) -> dict[str, ExpertPlace]:
    """Return where PEFT looks for the factors of the parameters that `target_parameters` means, without weights.

    Args:
        model_class: a class of transformers.
        entries: full names of parameters, or the ends of some, as `target_parameters` has them.
        config: the folder with the base's config.json.

    Returns:
        The places by the parameters' full names.

    Raises:
        ValidationError: transformers has no such class, PEFT takes no LoRA for one of these parameters, or there are
            too many entries for a model of this size.
    """
    model = empty_model(model_class, configuration(config))
    if len(entries) * sum(1 for _ in model.parameters()) > LIMITS.matches:
        raise ValidationError(
            f"target_parameters lists {len(entries):,} names", expected=f"at most {LIMITS.matches:,} comparisons"
        )
    settings = peft.LoraConfig(r=1, target_modules=[], target_parameters=list(entries))
    with _one_error(f"PEFT cannot wrap these parameters of {model_class}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return expert_places(peft.get_peft_model(model, settings, low_cpu_mem_usage=True))


def _parameter_problems(name: str, parameter: torch.Tensor, *, tensor: torch.Tensor | None) -> Iterator[str]:
    if tensor is None:
        yield f"{name} is a parameter without a tensor in the file"
    elif parameter.is_meta:
        yield f"{name} was left on the meta device"
    elif not torch.equal(parameter.float(), tensor.float()):
        yield f"{name} does not hold the file's values once loaded"


def _scaling_problems(loaded: Any) -> Iterator[str]:
    for name, layer in loaded.named_modules():
        if isinstance(layer, LoraLayer) and layer.scaling["default"] != 1.0:
            yield f"{name.removeprefix(KEY_PREFIX)} has scaling {layer.scaling['default']} instead of 1"


def _is_complaint(entry: warnings.WarningMessage, wrapped: Collection[str]) -> bool:
    # Of a linear module beside Conv1D, PEFT remarks that it decides the orientation by the module's class: rightly.
    orientation = str(entry.message).startswith("fan_in_fan_out is set to True but")
    return (
        issubclass(entry.category, UserWarning | RuntimeWarning)
        and not orientation
        and not applies_to_parameters(entry, wrapped)
    )


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:400]
