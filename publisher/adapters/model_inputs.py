"""Inputs on which any class of transformers can be run, made from its forward's parameters and its configuration.

Token ids for text, decoder token ids beside them where the class decodes, features or raw audio, pixels, and both of
a class with two towers. They are drawn with a fixed seed. Several sets may fit what a configuration says; which of them
a class takes is seen by running it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from publisher.numerics.randomness import seeded

Inputs = dict[str, Tensor]
_SEQUENCES, _TOKENS = 2, 32
_FRAMES = 20  # that a stack of convolutions is to leave of raw audio
_SPECTRA = 128  # of features, where the configuration does not say how many
_SAMPLES = 16_000  # of raw audio, where the configuration has no such stack
_IMAGE = 64  # of a side in pixels, where the configuration names none
_ELEMENTS = 2**26  # of one input: 256 MiB in float32
_PLACEHOLDERS = ("image", "video", "audio", "boi", "eoi")  # of tokens that stand for what is not given
_RUN_SEED = 0
_COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class InputError(Exception):
    """No input can be made for a class, or it gives nothing to compare; the text is the reason, without a full stop."""


def outputs_of(model: Any, inputs: Inputs) -> Mapping[str, Tensor]:
    """Return the main outputs of the model, float32: its logits, else its last hidden state, else all that float.

    Raises:
        InputError: there is none, or one is not finite.
    """
    with torch.inference_mode(), torch.random.fork_rng(devices=()):
        torch.manual_seed(_RUN_SEED)  # some classes draw numbers in evaluation too
        found = model(**inputs)
    named = dict(found) if isinstance(found, Mapping) else {"output": found[0] if isinstance(found, tuple) else found}
    floating = {
        name: value.float().clone()
        for name, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel()
    }
    logits = {name: value for name, value in floating.items() if "logits" in name}
    hidden = {name: value for name, value in floating.items() if name == "last_hidden_state"}
    main = logits or hidden or floating
    if not main:
        raise InputError(f"{type(model).__name__} gives no floating tensor to compare")
    if unsound := [name for name, value in main.items() if not bool(torch.isfinite(value).all())]:
        raise InputError(f"{type(model).__name__} gives numbers in {', '.join(unsound)} that are not finite")
    return main


def inputs_for(model: Any) -> Iterator[Inputs]:
    """Yield sets of inputs, of which the first that the model computes something of is the one to take.

    What forward has no default for is in each, and so is the class's main input. Where a class takes text beside images
    or audio, text alone comes first: which tokens stand for an image is the processor's business. A batch of 2 comes
    before a single one.

    Args:
        model: of transformers, in float32.

    Yields:
        Token ids, or normally distributed values, by the names of forward's arguments.

    Raises:
        InputError: forward needs something that is not made here, or a size is beyond what is run.
    """
    parameters = inspect.signature(model.forward).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty and one.kind not in _COLLECTING}
    if unknown := sorted(needed - _MAKERS.keys()):
        raise InputError(f"the forward of {type(model).__name__} takes {', '.join(unknown)}, which are not made here")
    for names, sequences in product(_names(model, set(parameters), needed=needed), (_SEQUENCES, 1)):
        choices = [[(name, shape) for shape in _MAKERS[name](model.config)] for name in names]
        for chosen in product(*choices):
            yield {name: _drawn(model.config, name, (sequences, *shape)) for name, shape in chosen}


def shapes_of(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input."""
    return {name: tuple(tensor.shape) for name, tensor in inputs.items()}


def _names(model: Any, named: set[str], *, needed: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the inputs to give: the fewest first."""
    main = {"input_ids"} & named or {name for name in _MAKERS if name == model.main_input_name}
    decoder = {"decoder_input_ids"} & named if getattr(model.config, "is_encoder_decoder", False) else set()
    least = needed | main | decoder
    more = [name for name in _MAKERS if name in named and name not in {*least, "decoder_input_ids"}]
    for wanted in (least, *(least | {name} for name in more)):
        yield tuple(name for name in _MAKERS if name in wanted)


# --- shapes: what follows the batch in each input -----------------------------------------------------------


def _parts(config: Any, *kinds: str) -> list[Any]:
    """Return the configurations of these parts, then the whole one."""
    parts = [getattr(config, f"{kind}_config", None) or getattr(config, kind, None) for kind in kinds]
    return [part for part in parts if hasattr(part, "to_dict")] + [config]


def _size(parts: Sequence[Any], *names: str) -> int | None:
    """Return the first whole number above zero that a part has by one of these names."""
    values = (getattr(part, name, None) for part in parts for name in names)
    return next((value for value in values if type(value) is int and value > 0), None)


def _token_shapes(config: Any) -> list[tuple[int, ...]]:
    text = config.get_text_config()
    positions = _size([text], "max_position_embeddings", "n_positions", "max_target_positions")
    return [(min(_TOKENS, max(positions // 2, 1)) if positions else _TOKENS,)]


def _decoder_shapes(config: Any) -> list[tuple[int, ...]]:
    positions = _size(_parts(config, "decoder"), "max_target_positions", "max_position_embeddings", "n_positions")
    return [(min(_TOKENS, max(positions // 2, 1)) if positions else _TOKENS,)]


def _sides(parts: Sequence[Any]) -> tuple[int, int]:
    for size in (getattr(part, "image_size", None) for part in parts):
        match size:
            case int(side) if side > 0:
                return side, side
            case [int(height), int(width)] | (int(height), int(width)) if height > 0 and width > 0:
                return height, width
    return _IMAGE, _IMAGE


def _pixel_shapes(config: Any) -> list[tuple[int, ...]]:
    parts = _parts(config, "vision", "encoder")
    image = (_size(parts, "num_channels", "in_channels", "in_chans") or 3, *_sides(parts))
    frames = _size(parts, "num_frames", "frames_per_clip")
    return [image, (frames, *image)] if frames else [image]


def _video_shapes(config: Any) -> list[tuple[int, ...]]:
    parts = _parts(config, "vision", "video", "encoder")
    image = (_size(parts, "num_channels", "in_channels", "in_chans") or 3, *_sides(parts))
    return [(_size(parts, "num_frames", "frames_per_clip") or 2, *image)]


def _feature_shapes(config: Any) -> list[tuple[int, ...]]:
    """Return features as (bins, frames), as Whisper takes them, then as (frames, bins)."""
    parts = _parts(config, "audio", "encoder")
    bins = _size(parts, "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")
    positions = _size(parts, "max_source_positions")
    frames = 2 * positions if positions else _SPECTRA
    return [(bins or 80, frames), (_SPECTRA, bins or 80), (1, _SPECTRA, bins or 80)]


def _audio_shapes(config: Any) -> list[tuple[int, ...]]:
    """Return raw audio that is long enough for the stack of convolutions; where there is none, a spectrogram too."""
    parts = _parts(config, "audio", "encoder")
    for part in parts:
        kernels, strides = getattr(part, "conv_kernel", None), getattr(part, "conv_stride", None)
        if isinstance(kernels, list | tuple) and isinstance(strides, list | tuple):
            return [(_before(kernels, strides),)]
    bins, frames = _size(parts, "num_mel_bins"), _size(parts, "max_length")
    spectrogram = [(frames, bins)] if bins and frames else []
    return [*spectrogram, (_SAMPLES,), (1, _SAMPLES)]


def _before(kernels: Sequence[Any], strides: Sequence[Any]) -> int:
    """Return how many samples the convolutions turn into the wanted frames."""
    samples = _FRAMES
    for kernel, stride in zip(reversed(kernels), reversed(strides), strict=False):
        if not (isinstance(kernel, int) and isinstance(stride, int)):
            return _SAMPLES
        samples = (samples - 1) * stride + kernel
    return samples


_MAKERS: Mapping[str, Callable[[Any], list[tuple[int, ...]]]] = {
    "input_ids": _token_shapes,
    "pixel_values": _pixel_shapes,
    "pixel_values_videos": _video_shapes,
    "input_features": _feature_shapes,
    "input_values": _audio_shapes,
    "decoder_input_ids": _decoder_shapes,
}


# --- drawing ------------------------------------------------------------------------------------------------


def _drawn(config: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    if torch.Size(shape).numel() > _ELEMENTS:
        raise InputError(f"{name} would have the shape {list(shape)}, which is too large to be run here")
    if name == "decoder_input_ids":
        return _token_ids(_parts(config, "decoder")[0].get_text_config(decoder=True), "decoder tokens", shape=shape)
    if name == "input_ids":
        ids = _token_ids(config.get_text_config(), "tokens", shape=shape)
        return _ended(_without_placeholders(ids, config), config)
    return torch.randn(shape, generator=seeded(name, torch.device("cpu")))


def _token_ids(config: Any, name: str, *, shape: tuple[int, ...]) -> Tensor:
    vocabulary = _size([config], "vocab_size")
    if vocabulary is None:
        raise InputError("its configuration has no vocab_size")
    return torch.randint(vocabulary, shape, generator=seeded(name, torch.device("cpu")))


def _without_placeholders(ids: Tensor, config: Any) -> Tensor:
    """Return ids none of which stands for an image or sound, which are not given."""
    fields = config.to_dict()
    special = {
        value
        for field, value in fields.items()
        if isinstance(value, int) and "token" in field and field.startswith(_PLACEHOLDERS)
    }
    if not special:
        return ids
    other = next(number for number in range(len(special) + 1) if number not in special)
    return torch.where(torch.isin(ids, torch.tensor(sorted(special))), other, ids)


def _ended(ids: Tensor, config: Any) -> Tensor:
    """Return ids with one end of the sequence, the last, for classes that read their answer there: BART and CLIP."""
    text = config.get_text_config()
    end, vocabulary = getattr(text, "eos_token_id", None), _size([text], "vocab_size") or 0
    if not (getattr(config, "is_encoder_decoder", False) or _has_towers(config)) or not isinstance(end, int):
        return ids
    if not 0 < end < vocabulary:
        return ids
    ids = torch.where(ids == end, end - 1, ids)
    ids[:, -1] = end
    return ids


def _has_towers(config: Any) -> bool:
    return len(_parts(config, "text", "vision")) > 2 or len(_parts(config, "text", "audio")) > 2  # noqa: PLR2004 - both, and the whole
