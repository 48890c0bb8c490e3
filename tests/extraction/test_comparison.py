"""What is told from two headers alone: names, shapes, dtypes, layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from publisher.checkpoints.headers import Scale, TensorHeader, file_headers
from publisher.checkpoints.pairs import CheckpointPair, Sides
from publisher.checkpoints.reading import TensorReader
from publisher.engines.local import Local
from publisher.errors import ExtractionError
from publisher.extraction.delta_norms import squared_norms
from publisher.extraction.preflight import layers_of, preflight, ranges
from publisher.extraction.tensor_bytes import different_tensors, equal
from publisher.records.checkpoint import Checkpoint, Snapshot
from publisher.records.progress import silent

Headers = Mapping[str, TensorHeader]


def header(*shape: int, dtype: str = "BF16") -> TensorHeader:
    return TensorHeader(dtype, shape, Path("model.safetensors"))


def headers(*names: str) -> dict[str, TensorHeader]:
    return dict.fromkeys(names, header(4, 4))


def different(pair: Sequence[Headers], folder: Path) -> tuple[str, ...]:
    """What differs between two checkpoints with these headers, whose files are in this folder."""
    with opened_pair(pair, folder) as both:
        return different_tensors(both, list(pair[0]), engine=Local(torch.device("cpu")), progress=silent)


@contextmanager
def opened_pair(pair: Sequence[Headers], folder: Path) -> Iterator[CheckpointPair]:
    snapshot = Snapshot(checkpoint=Checkpoint(kind="local", name="one", revision="", files=()), folder=folder)
    source, base = pair
    with TensorReader(source) as sources, TensorReader(base) as bases:
        yield CheckpointPair(Sides(snapshot, snapshot), Sides(base, source), Sides(bases, sources))


# --- what is read -------------------------------------------------------------------------------------------


def test_tensors_in_files_of_one_digest_are_equal_without_being_read(tmp_path: Path) -> None:
    pair = list[Headers]()
    for number, side in enumerate(("source", "base")):
        save_file({"b.weight": torch.full((4, 4), float(number))}, tmp_path / side)
        absent = TensorHeader("F32", (4, 4), tmp_path / "absent", sha256="one digest")
        own = replace(file_headers(tmp_path / side)["b.weight"], sha256=side)
        pair.append({"a.weight": absent, "b.weight": own})
    assert different(pair, tmp_path) == ("b.weight",)


def test_weights_of_one_file_whose_scales_are_in_others_are_read(tmp_path: Path) -> None:
    pair = list[Headers]()
    for number, side in enumerate(("source", "base")):
        save_file({"a.weight": torch.full((4, 4), float(number))}, tmp_path / side)
        stored = replace(file_headers(tmp_path / side)["a.weight"], sha256="one digest")
        scale = Scale(stored, "a.weight_scale_inv", replace(stored, sha256=side), (128, 128))
        pair.append({"a.weight": replace(stored, scale=scale)})
    assert different(pair, tmp_path) == ("a.weight",)


def test_weighing_counts_what_is_done(tmp_path: Path) -> None:
    pair = list[Headers]()
    for number, side in enumerate(("source", "base")):
        save_file({name: torch.full((4, 4), float(number)) for name in ("a", "b", "c")}, tmp_path / side)
        pair.append(file_headers(tmp_path / side))
    told: list[int] = []
    with opened_pair(pair, tmp_path) as both:
        engine = Local(torch.device("cpu"))
        found = squared_norms(
            both, ["a", "b", "c"], engine=engine, progress=lambda _what, done=0, _total=0: told.append(done)
        )
    assert found == {"a": 16.0, "b": 16.0, "c": 16.0}
    assert told == [0, 1, 2]


# --- which tensors match ------------------------------------------------------------------------------------


def test_equal_headers_leave_nothing_out() -> None:
    assert preflight(base=headers("a.weight", "b.weight"), tuned=headers("a.weight", "b.weight"), ignored=()) == ()


def test_a_whole_family_in_the_base_alone_is_normal() -> None:
    base = headers("model.a.weight", "mtp.fc.weight", "mtp.norm.weight", "lm_head.weight")
    assert preflight(base=base, tuned=headers("model.a.weight"), ignored=()) == ()


def test_one_missing_of_a_family_is_damage() -> None:
    with pytest.raises(ExtractionError, match=r"model\.b\.weight is in the base alone"):
        preflight(base=headers("model.a.weight", "model.b.weight"), tuned=headers("model.a.weight"), ignored=())


@pytest.mark.parametrize(("ours", "theirs"), [("BF16", "F32"), ("F16", "BF16"), ("F32", "F16")])
def test_float_dtypes_may_differ(ours: str, theirs: str) -> None:
    tuned, base = {"a.weight": header(4, 4, dtype=ours)}, {"a.weight": header(4, 4, dtype=theirs)}
    assert preflight(base=base, tuned=tuned, ignored=()) == ()


@pytest.mark.parametrize(("ours", "theirs"), [("F8_E4M3", "BF16"), ("BF16", "I8"), ("I32", "I64")])
def test_other_dtypes_may_not(ours: str, theirs: str) -> None:
    tuned, base = {"a.weight": header(4, 4, dtype=ours)}, {"a.weight": header(4, 4, dtype=theirs)}
    with pytest.raises(ExtractionError, match=f"a.weight is {ours} in the source and {theirs} in the base"):
        preflight(base=base, tuned=tuned, ignored=())


def test_what_the_manifest_ignores_is_left_out_with_its_reason() -> None:
    source = {"a.weight": header(4, 4), "head.weight": header(2, 4), "new.weight": header(4, 4)}
    base = {"a.weight": header(4, 4), "head.weight": header(3, 4)}
    left_out = preflight(base=base, tuned=source, ignored={"head.weight", "new.weight"})
    assert [(tensor.name, tensor.reason) for tensor in left_out] == [
        ("head.weight", "is 2x4 in the source and 3x4 in the base"),
        ("new.weight", "is in the source alone"),
    ]


def test_a_long_report_gives_the_first_dozen_and_how_many_more() -> None:
    extra = [f"layers.{i:02d}.weight" for i in range(20)]
    with pytest.raises(ExtractionError) as raised:
        preflight(base=headers("a.weight"), tuned=headers("a.weight", *extra), ignored=())
    lines = str(raised.value).splitlines()
    assert lines[0] == "source and base do not match in 20 tensors:"
    assert lines[1:13] == [f"  {name} is in the source alone" for name in extra[:12]]
    assert lines[13] == "  and 8 more"


# --- layers -------------------------------------------------------------------------------------------------


def stack(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{index}.proj.weight" for index in range(count)]


def test_layers_are_counted_in_the_stack_that_changed_most() -> None:
    text, vision = stack("model.language_model.layers", 64), stack("model.visual.blocks", 99)
    changed = [*text[40:], vision[1]]
    assert layers_of(changed, headers(*text, *vision)) == (tuple(range(40, 64)), 64)


def test_the_first_number_in_a_name_is_the_layer_and_not_an_expert() -> None:
    names = [f"model.layers.{layer}.experts.{expert}.up.weight" for layer in range(3) for expert in range(8)]
    assert layers_of(names[8:16], headers(*names)) == ((1,), 3)


def test_names_without_a_number_have_no_layers() -> None:
    assert layers_of(["lm_head.weight"], headers("lm_head.weight", *stack("layers", 3))) == ((), 0)


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((7,), "7"), ((0, 1, 2, 3), "0-3"), ((0, 1, 2, 3, 7, 9, 10), "0-3, 7, 9-10")]
)
def test_ranges_read_as_a_person_writes_them(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


@given(st.sets(st.integers(min_value=0, max_value=300)))
def test_ranges_name_each_number_once_in_as_few_runs_as_can_be(numbers: set[int]) -> None:
    runs = [run.split("-") for run in ranges(sorted(numbers)).split(", ") if run]
    named = [number for run in runs for number in range(int(run[0]), int(run[-1]) + 1)]
    assert named == sorted(numbers)
    assert len(runs) == sum(number - 1 not in numbers for number in numbers)


# --- equal bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
    ],
)
def test_tensors_of_every_dtype_can_be_compared(dtype: torch.dtype) -> None:
    one = torch.tensor([[1.0, 0.0], [1.0, 1.0]]).to(dtype)
    other = torch.tensor([[1.0, 0.0], [1.0, 0.0]]).to(dtype)
    assert equal(base=one, tuned=one.clone())
    assert not equal(base=other, tuned=one)


def test_a_base_of_another_dtype_is_cast_before_it_is_compared() -> None:
    base = torch.tensor([1.0, 1.001, -3.1416])
    assert equal(base=base, tuned=base.bfloat16())
    assert not equal(base=base.bfloat16(), tuned=base)


def test_zeros_of_either_sign_are_equal_and_so_is_the_same_nan() -> None:
    assert equal(base=torch.tensor([-0.0, 1.0]), tuned=torch.tensor([0.0, 1.0]))
    assert equal(base=torch.tensor([torch.nan, 1.0]), tuned=torch.tensor([torch.nan, 1.0]))
    assert not equal(base=torch.tensor([2.0, 1.0]), tuned=torch.tensor([torch.nan, 1.0]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (2, 3, 4)])
def test_every_shape_can_be_compared(shape: tuple[int, ...]) -> None:
    assert equal(base=torch.ones(shape), tuned=torch.ones(shape))


def test_a_tensor_is_compared_by_value_and_not_by_its_layout_in_memory() -> None:
    values = torch.arange(12.0).reshape(3, 4)
    assert equal(base=values.T, tuned=values.T.contiguous())
