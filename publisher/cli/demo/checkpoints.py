"""The demo's checkpoints: two small pairs of the real architecture, with a merged LoRA planted in each.

`clef` (64 layers, an adapter in layers 40-63) and `clef-flash` (32 layers, an adapter in all) stand beside their
bases, as transformers saves them. With each comes a head, so that it decides. One base has an FP8 release too, and
`requests` are there to be asked. They let every stage run for real without a download.

The same bytes come out on every run, with any number of threads: each tensor is drawn element by element from a
generator seeded with its own name, and the planted factors are multiples of 1/64, so that their product is exact in
whatever order it is summed. The folder appears whole or not at all. A folder that was not made here is refused,
never touched.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from publisher.cli.demo.fp8 import write_fp8
from publisher.cli.demo.requests import write_processor, write_requests
from publisher.errors import PublisherError
from publisher.records.files import canonical_json, digest_of, sha256_of
from publisher.records.new_folder import is_free
from publisher.records.progress import silent

if TYPE_CHECKING:
    from torch import Tensor

SEED = 20
RANK = 16
VALUE_HEADS = 8  # the height of in_proj_a and in_proj_b: below RANK, so that their update has full width, as in Clef
STAMP = "demo.json"
_MODULE = Path(__file__).with_name("release") / "joint_schema_model.py"
_SOURCES = (
    *(Path(__file__).with_name(f"{name}.py") for name in ("checkpoints", "fp8", "requests")),
    Path(__file__).parents[2] / "checkpoints" / "fp8.py",
    _MODULE,
)
_MAKERS = ("numpy", "pillow", "safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Pair:
    """One fine-tune and its base; the adapter lies in the layers from `first_adapted` to the last.

    Every linear is at least four times `RANK` in both directions, but for `in_proj_a` and `in_proj_b`.
    """

    name: str
    layers: int
    first_adapted: int
    hidden: int
    intermediate: int
    heads: int

    @property
    def base(self) -> str:
        """The base's folder name."""
        return f"{self.name}-base"


PAIRS = (
    Pair("clef", layers=64, first_adapted=40, hidden=96, intermediate=192, heads=6),
    Pair("clef-flash", layers=32, first_adapted=0, hidden=64, intermediate=128, heads=4),
)


def make_demo(folder: Path, *, progress: Callable[[str], None] | None = None) -> None:
    """Make both pairs in `folder`, bf16 and in shards; a finished demo of the same recipe is left as it is.

    Raises:
        PublisherError: `folder` exists and holds something that this function did not make.
    """
    report = progress or (lambda _: None)
    recipe = _recipe()
    if _is_finished(folder, recipe):
        report(f"{folder} is complete and up to date")
        return
    _refuse_what_is_not_ours(folder)
    place = folder.resolve()  # so that a symbolic link stays one
    place.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{place.name}.", suffix=".partial", dir=place.parent) as work:
        made = Path(work, "made")
        make_pairs(PAIRS, made, progress=lambda name: report(f"making {folder / name}"))
        stamp = {
            "made_by": __name__,
            "recipe": recipe,
            "files": {name: sha256_of(made / name) for name in _files(made)},
        }
        (made / STAMP).write_text(canonical_json(stamp), encoding="utf-8", newline="")
        if place.exists():
            place.rename(Path(work, "outdated"))
        made.rename(place)


def make_pairs(
    pairs: Sequence[Pair], folder: Path, *, shard_size: str = "3MB", progress: Callable[[str], None] = silent
) -> None:
    """Make each pair with its decider, an FP8 release of the last base, and requests.

    Args:
        pairs: what to make; the FP8 release is of the last one's base.
        folder: a folder that is not there yet.
        shard_size: the most that one file of weights may have, as transformers reads it.
        progress: called with the name of each pair before it is made.
    """
    for pair in pairs:
        progress(pair.name)
        _make_pair(pair, folder, shard_size=shard_size)
        _make_decider(pair, folder / pair.name)
    write_fp8(folder / pairs[-1].base, folder / f"{pairs[-1].base}-fp8")
    write_requests(folder / "requests")


def planted_update(pair: str, name: str, *, shape: tuple[int, ...]) -> "Tensor":
    """Compute what was merged into a linear weight, before the release was rounded.

    Args:
        pair: name of the pair.
        name: name of the weight.
        shape: (out, in) of the weight.

    Returns:
        A float32 tensor of this shape, whose rank is at most 16.
    """
    import torch

    generator = _generator(pair, name, "update")
    strength = generator.uniform(0.06, 0.3)
    left, right = (np.rint(generator.standard_normal(size) * 64) / 64 for size in ((shape[0], RANK), (RANK, shape[1])))
    scale = strength * _spread(name, shape)[1] / math.sqrt(RANK)
    return torch.from_numpy((scale * (left @ right)).astype(np.float32))


# --- the folder ---------------------------------------------------------------------------------------------


def _recipe() -> dict[str, Any]:
    """Return all that the bytes depend on."""
    return {
        "seed": SEED,
        "rank": RANK,
        "pairs": [asdict(pair) for pair in PAIRS],
        "made_with": {name: metadata.version(name) for name in _MAKERS},
        "source_sha256": digest_of([sha256_of(source) for source in _SOURCES]),
    }


def _files(folder: Path) -> list[str]:
    """Return every file in `folder` but the stamp, as relative paths."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(path for path in paths if path != STAMP)


def _read_stamp(folder: Path) -> dict[str, Any] | None:
    try:
        stamp = json.loads((folder / STAMP).read_bytes())
    except (OSError, ValueError):
        return None
    ours = isinstance(stamp, dict) and stamp.get("made_by") == __name__ and isinstance(stamp.get("files"), dict)
    return stamp if ours else None


def _is_finished(folder: Path, recipe: dict[str, Any]) -> bool:
    stamp = _read_stamp(folder)
    if stamp is None or stamp.get("recipe") != recipe:
        return False
    files = {name: folder / name for name in stamp["files"]}
    return all(path.is_file() and sha256_of(path) == stamp["files"][name] for name, path in files.items())


def _refuse_what_is_not_ours(folder: Path) -> None:
    if is_free(folder):
        return
    stamp = _read_stamp(folder)
    foreign = [name for name in _files(folder) if name not in stamp["files"]] if stamp else []
    if stamp is None or foreign:
        raise PublisherError(
            f"{folder / foreign[0] if foreign else folder} was not made by the demo, and would be replaced",
            expected=f"no folder of that name, or one that the demo made (its {STAMP} lists every file)",
            next_step="move it away, or run in another folder",
        )


# --- the checkpoints ----------------------------------------------------------------------------------------


def _make_pair(pair: Pair, folder: Path, *, shard_size: str) -> None:
    """Save the pair's base and fine-tune in `folder`, in shards of at most this size."""
    model = _empty_model(pair)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    base = {name: _base_weight(pair, name, shape=shape) for name, shape in shapes.items()}
    linears = _adapted_linears(model, pair)
    source = {name: _merged(pair, name, base=weight) if name in linears else weight for name, weight in base.items()}
    extra = {name: _base_weight(pair, name, shape=shape) for name, shape in _mtp_shapes(pair, shapes).items()}
    with _no_progress_bar():
        model.save_pretrained(folder / pair.name, state_dict=source, max_shard_size=shard_size)
        model.save_pretrained(folder / pair.base, state_dict=base | extra, max_shard_size=shard_size)


def _make_decider(pair: Pair, folder: Path) -> None:
    """Write what the source has beside its weights: decision module, head, tokenizer, image processor."""
    from safetensors.torch import save_file

    (folder / _MODULE.name).write_bytes(_MODULE.read_bytes())
    config = {"hidden_size": pair.hidden, "head_size": 32, "scale": 8.0}
    (folder / "joint_head_config.json").write_text(canonical_json(config), encoding="utf-8", newline="")
    head = {f"{part}.weight": _head_weight(pair, part) for part in ("question", "option")}
    save_file(head, folder / "joint_head.safetensors", metadata={"format": "pt"})
    write_processor(folder)


def _head_weight(pair: Pair, part: str) -> "Tensor":
    import torch

    values = _generator(pair.name, part, "head").standard_normal((32, pair.hidden)) / math.sqrt(pair.hidden)
    return torch.from_numpy(values.astype(np.float32))


def _empty_model(pair: Pair) -> Any:
    """Build the model on the meta device: names, shapes and configuration, no memory, no random initialisation."""
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config=_text_config(pair),
        vision_config=_vision_config(pair),
        vision_start_token_id=508,
        vision_end_token_id=509,
        image_token_id=510,
        video_token_id=511,
    )
    with torch.device("meta"):
        return Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001 - the one way to give a dtype


def _text_config(pair: Pair) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": pair.hidden,
        "intermediate_size": pair.intermediate,
        "num_hidden_layers": pair.layers,
        "num_attention_heads": pair.heads,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }


def _vision_config(pair: Pair) -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": 8,
        "num_position_embeddings": 64,
        "out_hidden_size": pair.hidden,
    }


def _adapted_linears(model: Any, pair: Pair) -> set[str]:
    from torch import nn

    stack = "model.language_model.layers"
    return {
        f"{stack}.{index}.{name}.weight"
        for index in range(pair.first_adapted, pair.layers)
        for name, module in model.get_submodule(f"{stack}.{index}").named_modules()
        if isinstance(module, nn.Linear)
    }


def _mtp_shapes(pair: Pair, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Qwen's multi-token prediction block, which transformers lacks: one attention layer."""
    layer = "model.language_model.layers.3."
    copied = {name.replace(layer, "mtp.layers.0."): shape for name, shape in shapes.items() if name.startswith(layer)}
    norms = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return {"mtp.fc.weight": (pair.hidden, 2 * pair.hidden), **copied, **dict.fromkeys(norms, (pair.hidden,))}


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- the weights --------------------------------------------------------------------------------------------

# Centre and deviation of what is no projection; the first pattern that is found in the name counts.
_SPREADS = (
    (r"\.A_log$", 1.0, 0.5),
    (r"\.dt_bias$", -2.0, 0.5),
    (r"(linear_attn\.norm|visual\..*norm\d?)\.weight$", 1.0, 0.1),
    (r"norm\w*\.weight$", 0.0, 0.1),  # Qwen's RMSNorm multiplies by 1 + weight
    (r"\.bias$", 0.0, 0.02),
    (r"embed(_tokens)?\.weight$", 0.0, 1.0),
)
# A projection's deviation times the root of its inputs. What is written to the residual stream is damped: random
# layers amplify rounding, and undamped ones would hide how close a restored adapter comes.
_GAINS = ((r"\.(o_proj|out_proj|down_proj)\.", 0.1), (r"^lm_head\.", 1.5), (r"", 1.0))


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    for pattern, centre, deviation in _SPREADS:
        if re.search(pattern, name):
            return centre, deviation
    gain = next(gain for pattern, gain in _GAINS if re.search(pattern, name))
    return 0.0, gain / math.sqrt(math.prod(shape[1:]))


def _base_weight(pair: Pair, name: str, *, shape: tuple[int, ...]) -> "Tensor":
    """Draw a tensor of the base in bf16; matrices have louder and quieter rows and columns, as trained ones do."""
    import torch

    generator = _generator(pair.name, name, "base")
    centre, deviation = _spread(name, shape)
    values = centre + deviation * generator.standard_normal(shape)
    if len(shape) > 1:
        for axis in (0, 1):
            values *= _loudness(generator, shape, axis=axis)
    return torch.from_numpy(values).to(torch.bfloat16)


def _loudness(generator: np.random.Generator, shape: tuple[int, ...], *, axis: int) -> NDArray[np.float64]:
    """Draw one factor for each row or column: mean 1, at least 0.8, now and then above 2."""
    along = [length if index == axis else 1 for index, length in enumerate(shape)]
    return 0.8 + 0.2 * generator.standard_normal(along) ** 2


def _merged(pair: Pair, name: str, *, base: "Tensor") -> "Tensor":
    """Return the release's weight: one rounding of base + update, as PEFT merges."""
    return (base.float() + planted_update(pair.name, name, shape=tuple(base.shape))).bfloat16()


def _generator(*names: str) -> np.random.Generator:
    digest = hashlib.sha256("/".join((str(SEED), *names)).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
