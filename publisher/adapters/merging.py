"""What each tensor of a base becomes when an adapter is merged into it: weights as the release was merged.

A weight in bf16, fp16 or fp32 stays in its dtype: base + B A, rounded once, or with the update rounded before, as
extraction.json says of the release; then the residual's elements are set. Where the release was merged in a longer
dtype than its own, it is the cast of what comes out. A weight in FP8 becomes bf16, or FP8 again with a new scale for
each block. Where experts in MXFP4 are merged, all of those become bf16. Modules that the adapter holds whole take the
place of the base's.

It refuses a base that lacks a module, or has it in another shape.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from publisher.adapters.parameters import unpacked
from publisher.adapters.peft_files import as_stored, carried_keys, token_row_keys
from publisher.adapters.residual import Residual
from publisher.border.safetensors_header import LORA_DTYPES
from publisher.checkpoints import fp8
from publisher.checkpoints.converting_reader import Conversion, parts_of
from publisher.checkpoints.dtypes import torch_dtype
from publisher.checkpoints.headers import Scale, TensorHeader
from publisher.checkpoints.mxfp4_reader import stored_names
from publisher.checkpoints.reading import Reader
from publisher.checkpoints.rewriting import Replacement
from publisher.errors import MergeError, listed
from publisher.numerics.delta import row_blocks
from publisher.numerics.intervals import merged
from publisher.records.extraction import (
    KEY_PREFIX,
    ExpertTensor,
    Extraction,
    ModuleExtraction,
    Roundings,
    TokenRows,
)
from publisher.records.filenames import RESIDUAL


@dataclass(frozen=True, slots=True)
class MergeInputs:
    """What is merged.

    Attributes:
        extraction: of the adapter.
        base: headers of the base, FP8 weights as they are read, dequantised.
        base_reader: of the base's tensors.
        adapter: headers of the adapter's tensors and, where there is one, of the residual's.
        adapter_reader: of those tensors.
    """

    extraction: Extraction
    base: Mapping[str, TensorHeader]
    base_reader: Reader
    adapter: Mapping[str, TensorHeader]
    adapter_reader: Reader

    @property
    def sets_residual(self) -> bool:
        """Whether there is a residual, of weights in the dtype that the base's have, or that they are cast to after."""
        found = {header.dtype for name, header in self.adapter.items() if name.endswith(".value")}
        there = {self.base[f"{module.name}.weight"].dtype for module in self.extraction.modules}
        fits = found <= there or (there == {"F32"} and self._is_cast_after)
        return RESIDUAL in self.extraction.summary.written and fits and len(there) == 1

    @property
    def _is_cast_after(self) -> bool:
        """Whether the cast of a merge in float32 is the release, which holds every value that it is cast to."""
        ways = {module.arithmetic.merged_in if module.arithmetic else None for module in self.extraction.modules}
        return ways == {"float32"}


def replacements(inputs: MergeInputs, *, again_fp8: bool) -> dict[str, Replacement | None]:
    """Return what takes the place of the base's stored tensors, by their names; None for scales that go.

    Args:
        inputs: what is merged.
        again_fp8: FP8 weights are quantised again; otherwise all of them become bf16.

    Raises:
        MergeError: naming each module that the base does not have.
    """
    _require_places(inputs)
    found: dict[str, Replacement | None] = {} if again_fp8 else dict(_dequantised(inputs))
    if any(inputs.base[tensor.name].mxfp4 for tensor in inputs.extraction.experts):
        found |= _unpacked(inputs)
    for module in inputs.extraction.modules:
        name, load = f"{module.name}.weight", partial(merged_weight, inputs, module)
        found |= _stored(name, inputs.base[name], load, again_fp8=again_fp8)
    for tensor in inputs.extraction.experts:
        load = partial(merged_experts, inputs, tensor)
        found |= _stored(tensor.name, inputs.base[tensor.name], load, again_fp8=again_fp8)
    for key, name in _whole_tensors(inputs):
        header = inputs.base[name]
        found[name] = Replacement(header.dtype, header.shape, partial(_whole, inputs, key, torch_dtype(header)))
    for key, table in token_row_keys(inputs.extraction.summary.token_rows).items():
        header = inputs.base[f"{table.module}.weight"]
        load = partial(_with_rows, inputs, key, table)
        found[f"{table.module}.weight"] = Replacement(header.dtype, header.shape, load)
    return _by_stored_names(found, inputs, again_fp8=again_fp8)


def _with_rows(inputs: MergeInputs, key: str, table: TokenRows) -> torch.Tensor:
    """Return the base's table with the adapter's rows in it."""
    weight = inputs.base_reader.read(f"{table.module}.weight")
    weight[list(table.rows)] = inputs.adapter_reader.read(key).to(weight.dtype)
    return weight


def _by_stored_names(
    found: Mapping[str, Replacement | None], inputs: MergeInputs, *, again_fp8: bool
) -> dict[str, Replacement | None]:
    """Return what is replaced by the names, and in the parts, that the base's files have."""

    @lru_cache(maxsize=2)  # parts lie beside each other in the files: an expert's of two parameters
    def reverted(conversion: Conversion) -> dict[str, torch.Tensor]:
        names = [name for name, header in inputs.base.items() if header.conversion is conversion]
        return conversion.reverted({name: _loaded(found.get(name), name, inputs) for name in names})

    stored: dict[str, Replacement | None] = {}
    for name, replacement in found.items():
        header = inputs.base.get(name)
        if header is None or header.conversion is None:
            stored[(header.stored or name) if header else name] = replacement
            continue
        for part in header.conversion.parts:
            load = partial(_part, reverted, header.conversion, part.name)
            stored |= _stored(part.name, part.header, load, again_fp8=again_fp8)
    return stored


def _loaded(replacement: Replacement | None, name: str, inputs: MergeInputs) -> torch.Tensor:
    return replacement.load() if replacement else inputs.base_reader.read(name)


def _part(
    reverted: Callable[[Conversion], Mapping[str, torch.Tensor]], conversion: Conversion, name: str
) -> torch.Tensor:
    return reverted(conversion)[name].contiguous()


def _require_places(inputs: MergeInputs) -> None:
    shapes: dict[str, tuple[int, ...]] = {
        f"{module.name}.weight": module.stored_shape for module in inputs.extraction.modules
    } | {tensor.name: tensor.shape for tensor in inputs.extraction.experts}
    there = {name: inputs.base[name] for name in shapes.keys() & inputs.base.keys()}
    problems = [f"{name} is not there" for name in sorted(shapes.keys() - there.keys())]
    problems += [f"{n} is {h.shape} instead of {shapes[n]}" for n, h in there.items() if h.shape != shapes[n]]
    problems += [f"{name} is in {h.dtype}, without scales" for name, h in there.items() if h.dtype not in LORA_DTYPES]
    if problems:
        raise MergeError(
            f"the base has no place for the adapter:\n{listed(problems)}\n",
            expected="the checkpoint that the adapter was made for",
            next_step="correct base in the manifest, and extract again",
        )


def _dequantised(inputs: MergeInputs) -> Iterator[tuple[str, Replacement | None]]:
    """Yield every FP8 weight in bf16, and None for its scales; and every weight that a QLoRA's base had in 4 bits."""
    for name, header in inputs.base.items():
        if header.quantised is not None:
            yield name, Replacement(header.dtype, header.shape, partial(inputs.base_reader.read, name))
    for name, header in parts_of(inputs.base).items():
        if header.scale is not None:
            yield name, Replacement(header.dtype, header.shape, partial(inputs.base_reader.read, name))
            yield header.scale.name, None


def _unpacked(inputs: MergeInputs) -> Iterator[tuple[str, Replacement | None]]:
    """Yield every tensor that is in MXFP4 in bf16: merged experts cannot be, and config.json has one format."""
    for name, header in inputs.base.items():
        if header.mxfp4 is not None:
            yield from _in_place_of_mxfp4(name, header, partial(inputs.base_reader.read, name))


def _in_place_of_mxfp4(
    name: str, header: TensorHeader, load: Callable[[], torch.Tensor]
) -> Iterator[tuple[str, Replacement | None]]:
    blocks, scales = stored_names(name)
    yield blocks, Replacement(header.dtype, header.shape, load, name)
    yield scales, None


def _stored(
    name: str, header: TensorHeader, load: Callable[[], torch.Tensor], *, again_fp8: bool
) -> Iterator[tuple[str, Replacement | None]]:
    """Yield what takes the place of a tensor that is merged, and of its scales where it is quantised."""
    if header.mxfp4 is not None:
        yield from _in_place_of_mxfp4(name, header, load)
        return
    if header.scale is None or not again_fp8:
        yield name, Replacement(header.dtype, header.shape, load)
        return
    stored, scales = header.scale.weight, header.scale.header
    yield name, Replacement(stored.dtype, stored.shape, lambda: _quantised(load(), header.scale)[0])
    yield header.scale.name, Replacement(scales.dtype, scales.shape, lambda: _quantised(load(), header.scale)[1])


def merged_weight(inputs: MergeInputs, module: ModuleExtraction) -> torch.Tensor:
    """Return the module's weight with the adapter in it, in the base's dtype, or bf16 where that is FP8."""
    weight = inputs.base_reader.read(f"{module.name}.weight")
    a, b = (inputs.adapter_reader.read(key).float() for key in module.keys)
    b, a = as_stored(module, a=a, b=b)
    matrix = weight.view(module.shape)
    for rows in row_blocks(matrix):
        matrix[rows] = merged(base=matrix[rows], product=b[rows] @ a, dtype=weight.dtype, arithmetic=_roundings(module))
    if inputs.sets_residual and f"{module.name}.index" in inputs.adapter:
        index, value = (inputs.adapter_reader.read(f"{module.name}.{part}") for part in ("index", "value"))
        weight = Residual(index.long(), value).apply(weight)
    return weight


def _roundings(module: ModuleExtraction) -> Roundings:
    if module.recovery is not None:
        return module.recovery.arithmetic
    return module.arithmetic.roundings if module.arithmetic else "one rounding"


def merged_experts(inputs: MergeInputs, tensor: ExpertTensor) -> torch.Tensor:
    """Return a parameter of experts with the adapter in it, in the base's dtype, as PEFT merges it."""
    weight = inputs.base_reader.read(tensor.name)
    a, b = (inputs.adapter_reader.read(key) for key in tensor.keys)
    b, a = unpacked(tensor, a=a, b=b)
    for matrix, left, right in zip(weight.reshape(-1, *tensor.matrix), b, a, strict=True):
        product = left.float() @ right.float()
        matrix.copy_(merged(base=matrix, product=product, dtype=weight.dtype, arithmetic="update rounded first"))
    return weight


def _quantised(weight: torch.Tensor, scale: Scale | None) -> tuple[torch.Tensor, torch.Tensor]:
    block, dtype = (scale.block, torch_dtype(scale.header)) if scale else ((1, 1), torch.float32)
    return fp8.quantise(weight, block, scales=dtype)


def _whole_tensors(inputs: MergeInputs) -> Iterator[tuple[str, str]]:
    """Yield the keys of the adapter's whole tensors with the base's names; a tied module may have none in the base."""
    for key in carried_keys(inputs.extraction.summary.carried):
        if (name := key.removeprefix(KEY_PREFIX)) in inputs.base:
            yield key, name


def _whole(inputs: MergeInputs, key: str, dtype: torch.dtype) -> torch.Tensor:
    return inputs.adapter_reader.read(key).to(dtype)
