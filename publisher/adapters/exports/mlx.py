"""mlx/: the LoRA as mlx-lm loads it, with `--adapter-path`.

mlx-lm has no alpha: `scale` is the factor itself, which is 1. It makes layers of one rank and refuses tensors of
another shape, so that narrower modules are padded with zeros; A and B are stored transposed. `num_layers` counts from
the last layer back to the first that has an adapter; modules of these layers that are not in the file stay at B = 0.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from publisher.adapters.exports.peft_adapter import FactorReader, PeftAdapter
from publisher.checkpoints.files import read_json
from publisher.checkpoints.headers import file_headers
from publisher.checkpoints.reading import TensorReader
from publisher.checkpoints.writing import Planned, write_tensors
from publisher.manifest.architectures import MLX_LM
from publisher.records.filenames import MLX_ADAPTER, MLX_CONFIG
from publisher.records.files import canonical_json, write_text

_LAYER = re.compile(r"(?:model|model\.language_model)\.layers\.(\d+)\.(.+)")


def mlx_obstacles(modules: Iterable[str], *, config: Mapping[str, Any]) -> list[str]:
    """Return a line for each module, by name, that mlx-lm cannot adapt."""
    text = config.get("text_config") or config
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return [
        f"{module}: mlx-lm has no such linear"
        for module in modules
        if (module == "lm_head" and tied) or (module != "lm_head" and not _LAYER.fullmatch(module))
    ]


def write_mlx(folder: Path, adapter: PeftAdapter) -> None:
    """Write `mlx/` below this folder; the same adapter gives the same bytes.

    Raises:
        NoRoomError: the disk is full.
    """
    write_text(folder / MLX_CONFIG, canonical_json(_config(adapter)))
    with adapter.factors() as factors:
        write_tensors(folder / MLX_ADAPTER, dict(_planned(adapter, factors)))


def mlx_problems(folder: Path, adapter: PeftAdapter) -> Iterator[str]:
    """Yield what of the files is not the adapter, as mlx-lm would load it."""
    if read_json(folder / MLX_CONFIG) != _config(adapter):
        yield f"{MLX_CONFIG} is not that of these modules, at a scale of 1"
    headers = file_headers(folder / MLX_ADAPTER)
    with adapter.factors() as factors, TensorReader(headers) as reader:
        planned = dict(_planned(adapter, factors))
        yield from (f"{name} is missing" for name in sorted(planned.keys() - headers))
        yield from (f"{name} belongs to no module" for name in sorted(headers.keys() - planned))
        for name in sorted(planned.keys() & headers):
            if not torch.equal(reader.read(name), planned[name].load()):
                yield f"{name} is not the adapter's"


def _config(adapter: PeftAdapter) -> dict[str, object]:
    text = adapter.config.get("text_config") or adapter.config
    matches = [_LAYER.fullmatch(module) for module in adapter.modules]
    layers = [int(match[1]) for match in matches if match]
    outside = [_renamed(m, adapter.model_class) for m, match in zip(adapter.modules, matches, strict=True) if not match]
    return {
        "fine_tune_type": "lora",
        "num_layers": text["num_hidden_layers"] - min(layers, default=0),
        "lora_parameters": {
            "rank": adapter.rank,
            "scale": 1.0,
            "dropout": 0.0,
            "keys": sorted({*(match[2] for match in matches if match), *outside}),
        },
    }


def _planned(adapter: PeftAdapter, factors: FactorReader) -> Iterator[tuple[str, Planned]]:
    for module in adapter.modules:
        name = _renamed(module, adapter.model_class)
        rows, columns = adapter.shape(module)
        yield f"{name}.lora_a", Planned((columns, adapter.rank), adapter.dtype, partial(_transposed, factors.a, module))
        yield f"{name}.lora_b", Planned((adapter.rank, rows), adapter.dtype, partial(_transposed, factors.b, module))


def _transposed(read: Callable[[str], torch.Tensor], module: str) -> torch.Tensor:
    return read(module).T


def _renamed(module: str, model_class: str) -> str:
    for beginning, name in MLX_LM[model_class].items():
        if module.startswith(beginning):
            return name + module.removeprefix(beginning)
    return module
