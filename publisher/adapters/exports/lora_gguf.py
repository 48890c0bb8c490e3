"""adapter_model.gguf: the LoRA as llama.cpp loads it, beside a GGUF of the base.

llama.cpp has one alpha for the whole file and scales each module by alpha / the rank of its tensors. All factors are
padded to one rank, so that this is 1 in every module: adding zeros changes no product. They are in llama.cpp's order
of rows and columns (`llamacpp`), and in float32, which holds them exactly: by narrower ones llama.cpp would multiply
activations that it rounds to their type. What was written is read back with the gguf package, put into transformers'
order, and has to be the adapter in every bit of every factor, and so of every product.
"""

from collections.abc import Iterator, Mapping
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from publisher.adapters.exports.llamacpp import Place, places
from publisher.adapters.exports.peft_adapter import FactorReader, PeftAdapter
from publisher.border.installing import install_command
from publisher.errors import ExtractionError
from publisher.manifest.architectures import LLAMA_CPP
from publisher.records.files import atomic

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_HALVES = ("lora_a", "lora_b")
_WIDTH = torch.float32.itemsize


def has_package() -> bool:
    """Return whether the gguf package is installed."""
    return util.find_spec("gguf") is not None


def require_package() -> None:
    """Raise an error unless the gguf package is installed.

    Raises:
        ExtractionError: it is not.
    """
    if not has_package():
        raise ExtractionError(
            "adapter.exports has gguf, and the gguf package is not installed",
            next_step=f"{install_command('gguf')}, or remove gguf from adapter.exports in the manifest",
        )


def write_gguf(path: Path, adapter: PeftAdapter) -> None:
    """Write the file, one tensor in memory at a time; the same adapter gives the same bytes.

    Raises:
        NoRoomError: the disk is full.
    """
    import gguf

    there, _ = _places(adapter)
    shapes = {name: shape for module, place in there.items() for name, shape in _shapes(adapter, module, place)}
    size = sum(rows * columns for rows, columns in shapes.values()) * _WIDTH
    writer = gguf.GGUFWriter(None, LLAMA_CPP[adapter.model_class])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(adapter.rank))
    for name, shape in shapes.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), shape[0] * shape[1] * _WIDTH)
    with atomic(path, size=size) as partial:
        try:
            writer.write_header_to_file(partial)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            with adapter.factors() as factors:
                for tensor in _tensors(factors, there):
                    writer.write_tensor_data(tensor)
        finally:
            writer.close()


def gguf_problems(path: Path, adapter: PeftAdapter) -> Iterator[str]:
    """Yield what of the file is not the adapter, as llama.cpp would load it."""
    import gguf

    reader = gguf.GGUFReader(path)
    yield from _heading_problems(reader, adapter)
    there, problems = _places(adapter)
    yield from problems
    found = {tensor.name: tensor for tensor in reader.tensors}
    expected = {f"{place.name}.{half}" for place in there.values() for half in _HALVES}
    yield from (f"{name} is missing" for name in sorted(expected - found.keys()))
    yield from (f"{name} belongs to no module" for name in sorted(found.keys() - expected))
    wrong = sorted(name for name, tensor in found.items() if tensor.tensor_type != gguf.GGMLQuantizationType.F32)
    yield from (f"{name} is not in float32" for name in wrong)
    alpha = _value(reader, gguf.Keys.Adapter.LORA_ALPHA)
    with adapter.factors() as factors:
        for module, place in there.items():
            pair = [found.get(f"{place.name}.{half}") for half in _HALVES]
            if all(one is not None and one.name not in wrong for one in pair):
                a, b = (_read(path, one) for one in pair if one is not None)
                yield from _module_problems(module, (a, b), place=place, alpha=alpha, factors=factors)


def _heading_problems(reader: "GGUFReader", adapter: PeftAdapter) -> Iterator[str]:
    import gguf

    wanted = {
        gguf.Keys.General.TYPE: gguf.GGUFType.ADAPTER,
        gguf.Keys.General.ARCHITECTURE: LLAMA_CPP[adapter.model_class],
        gguf.Keys.Adapter.TYPE: "lora",
    }
    for key, value in wanted.items():
        if (found := _value(reader, key)) != value:
            yield f"{key} is {found!r}; expected {value!r}"


def _module_problems(
    module: str, pair: tuple[torch.Tensor, torch.Tensor], *, place: Place, alpha: object, factors: FactorReader
) -> Iterator[str]:
    """Yield what of a module's A and B in the file (`pair`, float32) is not the adapter's.

    Equal factors have equal products, in whatever order they are summed.
    """
    a, b = pair
    if alpha != b.shape[1] or a.shape[0] != b.shape[1]:
        yield f"{module}: alpha {alpha} over rank {b.shape[1]} is no scale of 1"
    if a.shape != (factors.rank, factors.a(module).shape[1]) or b.shape != (factors.b(module).shape[0], factors.rank):
        yield f"{module}: A is {tuple(a.shape)} and B {tuple(b.shape)}, other shapes than the adapter's"
        return
    same = torch.equal(place.undone.a(a), factors.a(module).float())
    if not (same and torch.equal(place.undone.b(b), factors.b(module).float())):
        yield f"{module}: B A is not the adapter's"


def _places(adapter: PeftAdapter) -> tuple[Mapping[str, Place], list[str]]:
    shapes = {module: adapter.shape(module) for module in adapter.modules}
    return places(adapter.model_class, shapes, config=adapter.config)


def _shapes(adapter: PeftAdapter, module: str, place: Place) -> Iterator[tuple[str, tuple[int, int]]]:
    rows, columns = adapter.shape(module)
    yield f"{place.name}.lora_a", (adapter.rank, columns)
    yield f"{place.name}.lora_b", (rows, adapter.rank)


def _tensors(factors: FactorReader, there: Mapping[str, Place]) -> Iterator[NDArray[np.float32]]:
    """Yield the tensors in the order in which they were announced."""
    for module, place in there.items():
        yield place.a(factors.a(module).float()).numpy()
        yield place.b(factors.b(module).float()).numpy()


def _read(path: Path, tensor: "ReaderTensor") -> torch.Tensor:
    """Return a tensor in float32; its bytes are read, as the reader's map of the file would stay in memory."""
    octets = np.fromfile(path, dtype=np.float32, count=tensor.n_elements, offset=tensor.data_offset)
    return torch.from_numpy(octets).reshape(*map(int, reversed(tensor.shape)))


def _value(reader: "GGUFReader", key: str) -> object:
    field = reader.get_field(key)
    return None if field is None else field.contents()
