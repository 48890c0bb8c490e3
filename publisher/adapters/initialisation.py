"""Initialisations by which training begins from other weights than the base's, and what PEFT does of them as it loads.

PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take a part out of the base's weights before training. PEFT does so again as it
loads an adapter with the first two and the fourth, refuses one with the third, and forgets it for the last. Which of
these it is is seen on one small linear layer with weights, so that the base's size does not matter.
"""

import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import peft
import torch
from safetensors.torch import save_file

from publisher.border.adapterconfig import initialisation, loftq
from publisher.records.extraction import KEY_PREFIX
from publisher.records.filenames import ADAPTER, ADAPTER_CONFIG

_CHANGING: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
_RANK, _WIDTH = 2, 8  # of the small layer
_SEED = 0
_NAME = "0"  # of the layer in its model


@dataclass(frozen=True, slots=True)
class Initialised:
    """What an adapter's initialisation means for the base.

    Attributes:
        name: `init_lora_weights`; empty for one that is true or false, and so leaves the base as it is.
        changes_base: whether training began from other weights than the base's.
        again: whether PEFT changes the base's weights again as it loads the adapter.
        refusal: the error with which PEFT refuses to load an adapter of this initialisation.
    """

    name: str = ""
    changes_base: bool = False
    again: bool = False
    refusal: Exception | None = None

    @property
    def is_approximate(self) -> bool:
        """Whether each load draws random numbers, as PiSSA's fast singular values do."""
        return self.again and "_niter_" in self.name


def initialised(config: Mapping[str, Any]) -> Initialised:
    """Return what becomes of the base under an adapter with this configuration, as PEFT loads one small layer.

    Raises:
        ValidationError: the initialisation is none that can be tried.
    """
    name = initialisation(config)
    if not name:
        return Initialised()
    changes = re.split(r"_niter_", name.lower())[0] in _CHANGING
    weight = torch.randn(_WIDTH, _WIDTH, generator=torch.Generator().manual_seed(_SEED))
    layer = torch.nn.Linear(_WIDTH, _WIDTH, bias=False)
    layer.weight.data = weight.clone()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        _write(Path(folder), name, config)
        try:
            loaded = peft.PeftModel.from_pretrained(torch.nn.Sequential(layer), folder)
        except Exception as error:  # noqa: BLE001 - whatever PEFT raises is its refusal
            return Initialised(name, changes, refusal=error)
    kept = torch.equal(loaded.base_model.model[0].base_layer.weight, weight)
    return Initialised(name, changes, again=not kept)


def _write(folder: Path, name: str, config: Mapping[str, Any]) -> None:
    fields = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": [_NAME], "inference_mode": True}
    given = fields | {"init_lora_weights": name} | loftq(config)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(given), encoding="utf-8")
    factors = {"A": torch.zeros(_RANK, _WIDTH), "B": torch.zeros(_WIDTH, _RANK)}
    tensors = {f"{KEY_PREFIX}{_NAME}.lora_{half}.weight": factor for half, factor in factors.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
