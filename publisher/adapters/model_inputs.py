"""Inputs that a model of any class computes something of: token ids, features of audio, pixels, made from its config.

They are the same in every run. No input is larger than its limit, whatever config.json says. The class says by its
`forward` and its `main_input_name` what it takes; where it needs more than that, further inputs are added.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from publisher.numerics.randomness import seeded

_BATCH: Final = 2
_TOKENS: Final = 32
_FRAMES: Final = 16  # of audio, after the convolutions
_ELEMENTS: Final = 1 << 25  # of one input


def inputs_for(model: Any) -> Iterator[Mapping[str, torch.Tensor]]:
    """Yield sets of inputs by the names of the arguments, the smallest that the class may take first.

    Args:
        model: of transformers, in float32.

    Yields:
        Tensors of token ids, or of floating values, each for a batch of 2.
    """
    known = inspect.signature(type(model).forward).parameters
    config = model.config
    makers = {
        "input_ids": lambda: _ids(config, "tokens"),
        "pixel_values": lambda: _pixels(config),
        "input_features": lambda: _mel_features(config),
        "input_values": lambda: _sound(config),
    }
    main = model.main_input_name if model.main_input_name in makers else "input_ids"
    made = {name: tensor for name in makers if name in known and (tensor := makers[name]()) is not None}
    if main not in made:
        return
    ids = _ids(config, "decoder tokens") if _is_seq2seq(config, known) else None
    decoder = {} if ids is None else {"decoder_input_ids": ids}
    yield {main: made[main]} | decoder
    if len(made) > 1:
        yield made | decoder


def shapes_of(inputs: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each input."""
    return {name: tuple(tensor.shape) for name, tensor in inputs.items()}


def _is_seq2seq(config: Any, known: Mapping[str, object]) -> bool:
    return "decoder_input_ids" in known and bool(getattr(config, "is_encoder_decoder", False))


def _ids(config: Any, name: str) -> torch.Tensor | None:
    """Return token ids, (2, 32) or shorter where the model has fewer positions; None where it has no vocabulary."""
    text = config.get_text_config(decoder=True) if name == "decoder tokens" else config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not isinstance(vocabulary, int) or vocabulary < 1:
        return None
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    positions = [size for one in names if isinstance(size := getattr(text, one, None), int) and size > 0]
    length = min(_TOKENS, *positions) if positions else _TOKENS
    return torch.randint(vocabulary, (_BATCH, length), generator=seeded(name, torch.device("cpu")))


def _pixels(config: Any) -> torch.Tensor | None:
    """Return pixels, (2, channels, height, width); None where config.json does not say how large a picture is."""
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    height, width = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)  # noqa: PLR2004
    return _values("pixels", channels, height, width)


def _mel_features(config: Any) -> torch.Tensor | None:
    """Return features of audio, (2, mel bins, frames) as Whisper takes them; None where there are no such numbers."""
    audio = getattr(config, "audio_config", None) or config
    bins, positions = getattr(audio, "num_mel_bins", None), getattr(audio, "max_source_positions", None)
    return _values("features", bins, 2 * positions) if isinstance(positions, int) else None


def _sound(config: Any) -> torch.Tensor | None:
    """Return a wave of so many samples that 16 frames are left of it, or a spectrogram where the class takes that."""
    strides, kernels = getattr(config, "conv_stride", None), getattr(config, "conv_kernel", None)
    if isinstance(strides, list | tuple) and isinstance(kernels, list | tuple):
        return _values("sound", _FRAMES * math.prod(strides) + sum(kernels))
    return _values("sound", getattr(config, "max_length", None), getattr(config, "num_mel_bins", None))


def _values(name: str, *shape: Any) -> torch.Tensor | None:
    """Return normally distributed values, (2, *shape); None where the shape is none or too large."""
    if not all(isinstance(size, int) and size > 0 for size in shape) or _BATCH * math.prod(shape) > _ELEMENTS:
        return None
    return torch.randn((_BATCH, *shape), generator=seeded(name, torch.device("cpu")))
