"""An FP8 release of a base, emulated in bfloat16 on any device, in a model that is loaded already.

The weights become the checkpoint's own: FP8 ones dequantised by block, all others as stored. A linear that the
checkpoint holds in FP8 also gets its input quantised and dequantised, per token and group of channels. Of an adapted
linear that is the base layer alone: as in PEFT and vLLM, the LoRA branch takes the input unquantised.

Which modules are converted is read from the tensors and held against `modules_to_not_convert`. It refuses other schemes
than dynamic activations over block-scaled weights, and a checkpoint of another model.
"""

import re
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.quantizers_utils import should_convert_module

from publisher.checkpoints import fp8
from publisher.checkpoints.files import MODEL_CONFIG, read_config
from publisher.checkpoints.headers import Scale, TensorHeader
from publisher.checkpoints.snapshots import headers_of, reader_of
from publisher.errors import FetchError, listed
from publisher.records.checkpoint import Snapshot

_WEIGHT = ".weight"
_NEXT = "correct fp8 in the manifest"
_FP8_DTYPES = {"F8_E4M3", "F8_E5M2"}


def emulate(model: Any, snapshot: Snapshot) -> int:
    """Turn the model into that of the FP8 checkpoint, in place, and return how many linear layers are emulated.

    Args:
        model: a transformers model with the bfloat16 base's weights. An adapter is put on it afterwards.
        snapshot: the FP8 checkpoint, of the same architecture.

    Raises:
        FetchError: the checkpoint is not such an FP8 release, or not one of this model.
        HubError: a streamed checkpoint cannot be read.
    """
    where = snapshot.checkpoint.short
    headers = headers_of(snapshot)
    converted = {name.removesuffix(_WEIGHT): header.scale for name, header in headers.items() if header.scale}
    _require_scheme(where, read_config(snapshot.folder), converted=converted, headers=headers)
    _require_same_model(where, model, headers=headers)
    tensors = _tensors(model)
    modules = dict(model.named_modules())
    with torch.no_grad(), reader_of(snapshot, headers) as reader:
        for name in headers.keys() & tensors.keys():
            tensors[name].copy_(reader.read(name))
    emulated = [(modules[name], scale) for name, scale in converted.items() if name in modules]
    for linear, scale in emulated:
        _quantise_inputs(linear, group=scale.block[1])
    return len(emulated)


def requantised(values: Tensor, group: int) -> Tensor:
    """Return the values as they come back from FP8: bfloat16, in their shape (.., channels).

    Each group of channels of a token has the float32 scale amax / 448, and values are rounded to the nearest of
    float8_e4m3fn, ties to even (the format: https://arxiv.org/abs/2209.05433). A group of zeros stays zero.

    Args:
        values: activations of shape (.., channels), in any floating-point dtype.
        group: number of channels that share a scale; the last group may be narrower.
    """
    codes, scale = fp8.quantise(values.reshape(-1, values.shape[-1]), (1, group))
    return fp8.dequantise(codes, scale, (1, group)).reshape(values.shape)


def _quantise_inputs(linear: nn.Module, *, group: int) -> None:
    def quantised(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (requantised(inputs[0], group).to(inputs[0].dtype), *inputs[1:])

    linear.register_forward_pre_hook(quantised)


def _tensors(model: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers by every name they have."""
    return dict((*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)))


# --- what is refused ----------------------------------------------------------------------------------------


def _require_scheme(
    where: str,
    config: Mapping[str, Any],
    *,
    converted: Mapping[str, Scale],
    headers: Mapping[str, TensorHeader],
) -> None:
    quantisation = config.get("quantization_config") or {}
    for field, wanted in (("quant_method", "fp8"), ("activation_scheme", "dynamic")):
        if (found := quantisation.get(field)) != wanted:
            raise _refused(where, f"quantization_config.{field} in {MODEL_CONFIG} is {found!r}", expected=f"{wanted!r}")
    raw = [name for name, header in headers.items() if header.dtype in _FP8_DTYPES]
    if raw or not converted:
        raise _refused(where, _named("FP8 weights without scales", raw), expected="FP8 weights, each with block scales")
    kept = quantisation.get("modules_to_not_convert") or []
    against = [name for name in converted if not should_convert_module(name, kept)]
    if against:
        found = _named("modules in FP8 that modules_to_not_convert keeps out of it", against)
        raise _refused(where, found, expected=f"a {MODEL_CONFIG} that is of these weights")


def _require_same_model(where: str, model: Any, *, headers: Mapping[str, TensorHeader]) -> None:
    """Raise where a tensor has no place in the model, or another shape there.

    Those that transformers leaves unread for this class, such as `mtp.*`, need none.
    """
    there = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    unread = "|".join(model._keys_to_ignore_on_load_unexpected or ["$."])  # noqa: SLF001 - known nowhere else
    shapes = {name: header.shape for name, header in headers.items() if not re.search(unread, name)}
    problems = [f"{name} {shape} has no place in the base" for name, shape in shapes.items() if name not in there]
    problems += [f"{name} is in the base alone" for name in _missing(model, headers)]
    problems += [f"{n} is {s}, in the base {there[n]}" for n, s in shapes.items() if there.get(n, s) != s]
    if problems:
        found = f"{where} has tensors that are not those of the base:\n{listed(problems)}\n"
        raise FetchError(found, expected="an FP8 release of the same base", next_step=_NEXT)


def _missing(model: Any, names: Container[str]) -> list[str]:
    """Return the parameters that the file has under none of their names: a tied one is stored once."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    held = {id(tensor) for name, tensor in parameters if name in names}
    return [name for name, tensor in parameters if id(tensor) not in held]


def _refused(where: str, found: str, *, expected: str) -> FetchError:
    return FetchError(f"{where}: {found}", expected=expected, next_step=_NEXT)


def _named(what: str, names: list[str]) -> str:
    return f"{what}: {', '.join(names[:3])}" if names else "no FP8 weights"
