"""An FP8 release of a checkpoint, made as the large ones are: block-scaled linears, and a config.json that says so.

For the demo's base and for tests; a release for serving is made by the tools of its engine.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from publisher.records.files import canonical_json

BLOCK = (128, 128)
_MATRIX = 2
_LINEAR = re.compile(r"proj(_\w+)?\.weight$")


def write_fp8(source: Path, target: Path, *, kept: Sequence[str] = ("lm_head", "model.visual", "mtp")) -> int:
    """Write an FP8 release of a checkpoint: the linears of its text tower in FP8 with block scales, the rest as it is.

    Args:
        source: a folder with a checkpoint in bfloat16.
        target: a folder that is not there yet; it gets one shard and config.json.
        kept: names of modules that stay as they are, as in `modules_to_not_convert`.

    Returns:
        How many linears are in FP8.
    """
    from safetensors.torch import load_file, save_file
    from transformers.quantizers.quantizers_utils import should_convert_module

    from publisher.checkpoints import fp8

    weights = {name: w for file in sorted(source.glob("*.safetensors")) for name, w in load_file(file).items()}
    linears = [name for name, weight in weights.items() if weight.ndim == _MATRIX and _LINEAR.search(name)]
    chosen = [name for name in linears if should_convert_module(name.removesuffix(".weight"), [*kept])]
    for name in chosen:
        codes, scale = fp8.quantise(weights[name], BLOCK)
        weights |= {name: codes, f"{name}_scale_inv": scale}
    target.mkdir(parents=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    how = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = how | {"modules_to_not_convert": [*kept]}
    (target / "config.json").write_text(canonical_json(config), encoding="utf-8", newline="")
    return len(chosen)
