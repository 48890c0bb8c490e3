"""What weights are that cannot be compared as they stand, told by names, dtypes and shapes of tensors and by configs.

Quantised weights, an adapter that was not merged, the placeholders of a training framework and checkpoints of other
libraries are each refused in one sentence, before any weight is read. The tensors decide: where config.json speaks of
a quantisation that is known here, and the weights are plain, they are read. FP8 with block scales and the MXFP4 of
gpt-oss are read dequantised.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from publisher.border.json_text import parse_json_object
from publisher.border.names import shortened
from publisher.border.safetensors_header import UNREAD_BITS
from publisher.checkpoints.card_fields import Beside, base_in_card, is_repository
from publisher.checkpoints.folder_formats import DIFFUSERS_NEXT, MISTRAL_NEXT
from publisher.errors import FetchError

Config = Mapping[str, Any]

_FP8: Final = frozenset({"F8_E4M3", "F8_E5M2"})
_CODES: Final = frozenset({"U8", "I8", "I16", "U16", "I32", "U32"})
_MATRIX: Final = 2  # dimensions
_LEVELS: Final = 4  # of config.json, in which a quantisation is looked for
_WORD: Final = re.compile(r"[\w.+-]{1,40}", re.ASCII)
_SHOWN: Final = 120  # characters of a tensor's name


class Described(Protocol):
    """What a header says of a tensor."""

    @property
    def dtype(self) -> str:
        """The tensor's dtype, in safetensors' spelling."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape, as it is stored."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A tensor that a plain checkpoint does not have.

    Attributes:
        ending: of its name.
        beside: the ending of another tensor of the same module that must be there as well; empty where none.
        dtypes: of that other tensor, or of this one where there is no other; empty where any will do.
    """

    ending: str
    beside: str = ""
    dtypes: frozenset[str] = frozenset()

    def shows(self, name: str, tensors: Mapping[str, Described]) -> bool:
        """Return whether this tensor of a checkpoint is such a one."""
        if not name.endswith(self.ending):
            return False
        other = tensors.get(name.removesuffix(self.ending) + self.beside) if self.beside else tensors[name]
        return other is not None and (not self.dtypes or other.dtype in self.dtypes)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A way to store weights that is not read here.

    Attributes:
        name: as the field calls it; completes "its weights are stored as ...".
        signs: of which each one alone shows it, where no format before it in the list is shown.
    """

    name: str
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class OtherFormat:
    """What a state dict or a config is of that is no model of transformers: completes "the checkpoint holds ..."."""

    name: str
    next_step: str


UNMERGED: Final = OtherFormat(
    "an adapter that is not merged",
    "merge it: load the model with PEFT, call merge_and_unload() and save_pretrained, and name that folder",
)
PLACEHOLDERS: Final = OtherFormat(
    "empty weights, as DeepSpeed ZeRO-3 leaves in the place of those on other ranks",
    "gather the weights when saving (stage3_gather_16bit_weights_on_model_save), or put them together with DeepSpeed's "
    "zero_to_fp32.py, and name what save_pretrained then writes",
)
FLATTENED: Final = OtherFormat(
    "the flattened parameters of FSDP",
    "save a full state dict (fsdp_state_dict_type: FULL_STATE_DICT) through save_pretrained, and name that folder",
)
ORIGINAL: Final = OtherFormat("a checkpoint of Mistral's or Meta's own format", MISTRAL_NEXT)
DIFFUSERS: Final = OtherFormat("a diffusers model", DIFFUSERS_NEXT)
TIMM: Final = OtherFormat(
    "a model of timm",
    "write both sides with transformers' TimmWrapper classes (from_pretrained, then save_pretrained), and name those "
    "folders",
)
OTHER_FORMATS: Final = (UNMERGED, PLACEHOLDERS, FLATTENED, ORIGINAL, DIFFUSERS, TIMM)


def _shown_by(name: str, *signs: Sign | str) -> WeightFormat:
    return WeightFormat(name, tuple(Sign(sign) if isinstance(sign, str) else sign for sign in signs))


def _scaled(name: str, ending: str, dtypes: frozenset[str]) -> WeightFormat:
    return _shown_by(name, Sign(ending, ".weight", dtypes))


WEIGHT_FORMATS: Final = (
    _shown_by(
        "bitsandbytes 4-bit",
        ".quant_state.bitsandbytes__nf4",
        ".quant_state.bitsandbytes__fp4",
        ".absmax",
        ".quant_map",
    ),
    _shown_by("bitsandbytes 8-bit", ".SCB", ".weight_format"),
    _shown_by("NVFP4 (ModelOpt)", "weight_scale_2"),
    _shown_by("NVFP4 (compressed-tensors)", "weight_global_scale"),
    _shown_by("compressed-tensors, packed", "weight_packed", ".bitmask"),
    _shown_by("GPTQ", Sign(".g_idx", ".qweight")),
    _shown_by("FP-Quant", Sign(".qweight", ".dqweight"), ".dqweight"),
    _shown_by("AWQ", ".qweight", ".qzeros"),
    _shown_by("EXL2 (ExLlamaV2)", ".q_weight", ".q_invperm"),
    _shown_by("EXL3 (ExLlamaV3)", ".trellis"),
    _shown_by("HQQ", ".W_q"),
    _shown_by("AQLM", Sign(".codes", ".codebooks")),
    _shown_by("VPTQ", ".centroids.weight", ".indices_centroids"),
    _shown_by("QuIP#", ".Qidxs"),
    _shown_by("SpQR", ".dense_weights"),
    _shown_by("Quanto", "._data"),
    _shown_by("torchao", "_qdata", ":qdata", ":int_data"),
    _scaled("EETQ", ".weight_scales", _CODES),
    _scaled("MLX, quantised", ".scales", frozenset({"U32"})),
    _scaled("Metal, quantised", ".qbiases", _CODES),
    _scaled("FP8 with one scale for a tensor or a row", ".weight_scale", _FP8),
    _scaled("FP8 as ComfyUI has it", ".scale_weight", _FP8),
    _scaled("FP8 of Mistral's own format", ".qscale_weight", _FP8),
    _scaled("FP8 as DeepSeek's own files have it", ".scale", _FP8),
    _scaled("8-bit integers with scales", ".weight_scale", frozenset({"I8"})),
    _scaled("BitNet, or another format with a scale beside packed weights", ".weight_scale", _CODES),
    _shown_by("MXFP4 of shapes that gpt-oss does not have", Sign("_blocks", "_scales"), Sign("_scales", "_blocks")),
)
"""In the order in which they are tried: the more telling tensor first."""

METHODS: Final = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "exl2": "EXL2 (ExLlamaV2)",
    "exl3": "EXL3 (ExLlamaV3)",
    "fbgemm_fp8": "FBGEMM FP8",
    "fouroversix": "Four over Six",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gemma": "Gemma's own quantisation",
    "gguf": "GGUF",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "intel/auto-round": "AutoRound",
    "metal": "Metal, quantised",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "sinq": "SINQ",
    "spqr": "SpQR",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""What `quant_method` of a config is called."""

_METHOD_OF_FILE: Final = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quanto_qmap.json": "quanto",
    "quant_strategy.json": "",
}
_DETAILS: Final = ("bnb_4bit_quant_type", "format", "quant_algo", "bits", "w_bit", "nbits", "weights", "quant_type")


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a config says of the quantisation: its method, empty where it names none, in words, and in which file."""

    method: str
    words: str
    file: str
    model: str = ""


# --- the check -------------------------------------------------------------------------------------------------


def require_plain(tensors: Mapping[str, Described], config: Config, *, where: str, beside: Beside) -> None:
    """Raise unless the weights are plain, or of a format that is read dequantised.

    Args:
        tensors: what the headers say, by name.
        config: the checkpoint's config.json.
        where: the checkpoint, for the message.
        beside: reads its other small files, of which some name the format and the base; asked where something is
            wrong.

    Raises:
        FetchError: one sentence that names what the weights are, and the next step.
    """
    if (found := _other_library(config)) or (found := _other_state(tensors)):
        kind, seen = found
        raise FetchError(
            f"{where} holds {kind.name} ({shortened(seen, width=_SHOWN)})", expected=_EXPECTED, next_step=kind.next_step
        )
    shown = _shown_format(tensors)
    stated = next(_stated(config, "config.json"), None)
    if shown is None and (stated is None or not stated.method or stated.method in METHODS):
        return
    stated = stated or _stated_beside(beside)
    raise FetchError(
        f"{where} is quantised: {_words(shown, stated)}",
        expected=_EXPECTED,
        next_step=f"name the checkpoint before it was quantised{_hint(config, stated, beside)}; if a LoRA was merged "
        "into these weights, merge it into that one and write the result with save_pretrained"
        + ("" if shown else "; if the weights are plain all the same, take quantization_config out of config.json"),
    )


def speaks_of_quantisation(config: Config) -> bool:
    """Return whether a config.json speaks of quantised weights, whatever the weights are."""
    return any(_stated(config, "config.json"))


_EXPECTED: Final = "plain weights in bf16, fp16 or fp32 as save_pretrained writes them, FP8 with block scales, or MXFP4"


def _words(shown: tuple[str, str] | None, stated: _Stated | None) -> str:
    """Return what the weights are, by the config's words where it has some, and what shows it."""
    says = stated if stated and stated.words else None
    name = says.words if says else shown[0] if shown else ""
    seen = [*([shortened(shown[1], width=_SHOWN)] if shown else []), *([says.file] if says else [])]
    return f"{name}, by {' and '.join(seen)}"


# --- what the tensors show ---------------------------------------------------------------------------------------

_ADAPTER: Final = re.compile(
    r"\.(base_layer|original_module|modules_to_save)\.|(^|[._])lora_(a|b|embedding_a|embedding_b|magnitude_vector|up|"
    r"down)(\.|$)|\.(ia3_l|oft_r|boft_r|vera_lambda_[bd]|hada_w[12]_[ab]|lokr_w[12](_[ab])?|hra_u)(\.|$)",
    re.IGNORECASE,
)


def _other_state(tensors: Mapping[str, Described]) -> tuple[OtherFormat, str] | None:
    """Return what a state is that is no model's weights in transformers' names, and the tensor that shows it."""
    for kind, found in (
        (UNMERGED, filter(_ADAPTER.search, tensors)),
        (PLACEHOLDERS, (name for name, one in tensors.items() if name.endswith(".weight") and one.shape == (0,))),
        (FLATTENED, (name for name in tensors if name.endswith("_flat_param"))),
        (ORIGINAL, (name for name in tensors if name.endswith(".attention.wq.weight"))),
    ):
        if (name := next(iter(found), None)) is not None:
            return kind, name
    return None


def _other_library(config: Config) -> tuple[OtherFormat, str] | None:
    """Return which other library a config.json is of, and the class that it names; None for one of transformers."""
    if isinstance(name := config.get("_class_name"), str) and "_diffusers_version" in config:
        return DIFFUSERS, name
    if isinstance(name := config.get("architecture"), str) and {"pretrained_cfg", "num_features"} & config.keys():
        return TIMM, name
    return None


def _shown_format(tensors: Mapping[str, Described]) -> tuple[str, str] | None:
    """Return the format that the tensors show, by name, and the first tensor that does; None for plain weights."""
    found = {name: tensors[name] for name in sorted(tensors) if name.endswith(_ENDINGS)}
    for kind in WEIGHT_FORMATS:
        for name in found:
            if any(sign.shows(name, tensors) for sign in kind.signs) and not is_mxfp4(name, tensors):
                return kind.name, name
    for name, one in tensors.items():
        is_weight = name.endswith(("weight", "proj")) and len(one.shape) >= _MATRIX
        if is_weight and one.dtype in _FP8 and (how := _unread_fp8(tensors.get(f"{name}_scale_inv"))):
            return how, name
        if (is_weight and one.dtype in _CODES) or one.dtype in UNREAD_BITS:
            return f"weights packed in {one.dtype}", name
    return None


_ENDINGS: Final = tuple(sign.ending for kind in WEIGHT_FORMATS for sign in kind.signs)


def _unread_fp8(scale: Described | None) -> str:
    """Return what FP8 with these scales is, unless they are one floating-point number for each block."""
    if scale is None:
        return "FP8 without scales"
    if scale.dtype in _CODES:
        return "MXFP8"
    return "FP8 with one scale for a tensor or a row" if len(scale.shape) < _MATRIX else ""


def is_mxfp4(name: str, tensors: Mapping[str, Described]) -> bool:
    """Return whether a tensor is the blocks or the scales of experts in MXFP4, in the shapes of gpt-oss.

    Blocks are U8 of shape (experts, out, in / 32, 16), scales U8 of shape (experts, out, in / 32). No tensor has the
    name that they are read by.
    """
    stem, _, ending = name.rpartition("_")
    blocks, scales = tensors.get(f"{stem}_blocks"), tensors.get(f"{stem}_scales")
    return (
        ending in {"blocks", "scales"}
        and stem not in tensors
        and blocks is not None
        and scales is not None
        and blocks.dtype == scales.dtype == "U8"
        and len(scales.shape) == 3  # noqa: PLR2004 - experts, rows and blocks
        and blocks.shape == (*scales.shape, 16)
    )


# --- what the configs say ----------------------------------------------------------------------------------------


def _stated(config: Config, file: str, level: int = 0) -> Iterator[_Stated]:
    """Yield what a config says of quantisations, in any of its parts."""
    for key, value in config.items():
        if not isinstance(value, dict):
            continue
        if key in {"quantization_config", "compression_config", "quantization", "quant_config"} and value:
            yield _read(value, file)
        elif level < _LEVELS:
            yield from _stated(value, file, level + 1)


def _read(found: Config, file: str, method: str = "") -> _Stated:
    """Return what one `quantization_config` says; `method` is that of the file, for one that names none."""
    given = found.get("quant_method")
    method = given.lower() if isinstance(given, str) else method or _guessed(found)
    details = [detail for field in _DETAILS if (detail := _detail(found.get(field)))][:1]
    if method == "bitsandbytes":
        details = ["8-bit"] if found.get("load_in_8bit") is True else ["4-bit", *details]
    name = METHODS.get(method, f"a method that is not known here, {shortened(method)}" if method else "")
    words = f"{name} ({', '.join(details)})" if name and details else name
    model = found.get("model_name_or_path")
    return _Stated(method, words, file, model if isinstance(model, str) else "")


def _guessed(found: Config) -> str:
    """Return the method of a config that names none, by fields that one method alone has."""
    if found.get("load_in_4bit") is True or found.get("load_in_8bit") is True:
        return "bitsandbytes"
    if isinstance(found.get("quant_algo"), str):
        return "modelopt"
    return "compressed-tensors" if "config_groups" in found else ""


def _detail(value: object) -> str:
    match value:
        case bool():
            return ""
        case int() if 0 < value <= 16:  # noqa: PLR2004 - bits
            return f"{value}-bit"
        case str() if _WORD.fullmatch(value):
            return value
    return ""


def _stated_beside(beside: Beside) -> _Stated | None:
    """Return what another file beside the weights says of the quantisation, the first that there is."""
    for file, method in _METHOD_OF_FILE.items():
        if (text := beside(file)) is None:
            continue
        try:
            found = parse_json_object(text.encode())
        except ValueError:
            continue
        return next(_stated(found, file), None) or _read(found, file, method)
    return None


def _hint(config: Config, stated: _Stated | None, beside: Beside) -> str:
    """Return in brackets the base that the card or the configs name, if one does."""
    if named := base_in_card(beside):
        return f" (its card names {named})"
    for value in (stated.model if stated else "", config.get("_name_or_path")):
        if isinstance(value, str) and is_repository(value):
            return f" (its config names {value})"
    return ""
