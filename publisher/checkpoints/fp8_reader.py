"""FP8 weights with block scales as the rest of the tool sees them: matrices in bfloat16, without the scales.

It works on any reader, of files or of ranges. An FP8 weight without scales stays what it is, for others to refuse;
scales that do not fit the blocks are refused here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from publisher.checkpoints.files import MODEL_CONFIG
from publisher.checkpoints.headers import Scale, TensorHeader
from publisher.checkpoints.reading import Reader, in_blocks
from publisher.errors import FetchError

if TYPE_CHECKING:
    import torch

_FP8 = "F8_E4M3"
_SCALES = "_scale_inv"  # after the name of an FP8 weight


def dequantised_headers(
    headers: Mapping[str, TensorHeader], config: Callable[[], Mapping[str, Any]], *, where: str
) -> dict[str, TensorHeader]:
    """Return the headers as they are after dequantisation; those of a checkpoint without FP8 stay as they are.

    Args:
        headers: as the files have them.
        config: gives config.json, and is asked only where there are scales.
        where: the checkpoint, for messages.

    Returns:
        Headers of FP8 weights as bfloat16 with their `scale` set, no headers of scales, and all others.

    Raises:
        FetchError: the size of the blocks is not known, or the scales do not fit it.
    """
    scales = {f"{name}{_SCALES}": name for name, header in headers.items() if header.dtype == _FP8}
    scales = {scale: name for scale, name in scales.items() if scale in headers}
    if not scales:
        return dict(headers)
    block = _weight_block(config(), where)
    wrong = [
        f"{name} {headers[name].shape}" for name in scales if headers[name].shape != _grid(headers[scales[name]], block)
    ]
    if wrong:
        raise FetchError(
            f"{where}: scales that do not fit blocks of {block[0]}x{block[1]}: {', '.join(wrong[:3])}",
            expected="one scale per block, as quantization_config.weight_block_size in config.json says",
            next_step="download or save the checkpoint again",
        )
    read = {
        name: replace(headers[name], dtype="BF16", scale=Scale(headers[name], scale, headers[scale], block))
        for scale, name in scales.items()
    }
    return {name: read.get(name, header) for name, header in headers.items() if name not in scales}


def stored_headers(headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Return the headers that `dequantised_headers` was given."""
    plain = {name: header.scale.weight if header.scale else header for name, header in headers.items()}
    return plain | {h.scale.name: h.scale.header for h in headers.values() if h.scale}


class DequantisingReader:
    """Reads tensors dequantised, on top of a reader of the stored ones."""

    def __init__(self, reader: Reader, headers: Mapping[str, TensorHeader]) -> None:
        """Prepare to read the tensors of headers from `dequantised_headers`.

        Args:
            reader: of the tensors of `stored_headers`.
            headers: as from `dequantised_headers`.
        """
        self._reader = reader
        self._scales = {name: header.scale for name, header in headers.items() if header.scale is not None}

    def read(self, name: str) -> "torch.Tensor":
        """Return the tensor in its stored dtype, or in bfloat16 if it is a weight in FP8 with scales."""
        scale = self._scales.get(name)
        if scale is None:
            return self._reader.read(name)
        from publisher.checkpoints import fp8

        return fp8.dequantise(self._reader.read(name), self._reader.read(scale.name), scale.block)

    def blocks(self, name: str, elements: int) -> "Iterator[torch.Tensor]":
        """Return the tensor flat, in blocks of `elements` elements, of which the last may be shorter."""
        return in_blocks(self.read(name), elements) if name in self._scales else self._reader.blocks(name, elements)

    def steps(self, name: str) -> "torch.Tensor | None":
        """Return the distance of an FP8 weight's stored values at each element, float32; None for any other tensor."""
        scale = self._scales.get(name)
        if scale is None:
            return None
        from publisher.checkpoints import fp8

        return fp8.steps_of(self._reader.read(name), self._reader.read(scale.name), scale.block)


def steps(name: str, reader: Reader) -> "torch.Tensor | None":
    """Return the distance of a tensor's stored values at each element, float32; None unless it is in FP8."""
    found = getattr(reader, "steps", None)
    return found(name) if found is not None else None


def _grid(weight: TensorHeader, block: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of the scales of this weight; blocks at the edges may be smaller."""
    rows, columns = (-(-size // edge) for size, edge in zip(weight.shape[-2:], block, strict=True))
    return (*weight.shape[:-2], rows, columns)


def _weight_block(config: Mapping[str, Any], where: str) -> tuple[int, int]:
    quantisation = config.get("quantization_config")
    match quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise FetchError(
        f"{MODEL_CONFIG} of {where} does not say how large the blocks of its FP8 weights are",
        expected='"quantization_config": {"weight_block_size": [128, 128], ...}',
        next_step="download the checkpoint's own config.json",
    )
