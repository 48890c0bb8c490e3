"""Our safetensors files are, byte for byte, those that safetensors writes, in every dtype."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from publisher.border import safetensors_header
from publisher.checkpoints.writing import Planned, write_tensors

DTYPES = st.sampled_from([getattr(torch, dtype.torch) for dtype in safetensors_header.DTYPES.values()])
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda n: n != "__metadata__")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(kinds=st.dictionaries(NAMES, st.tuples(DTYPES, SHAPES), max_size=6))
def test_the_same_tensors_give_the_bytes_that_safetensors_gives(
    kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]], tmp_path: Path
) -> None:
    tensors = {name: (3 * torch.randn(shape)).abs().to(dtype) for name, (dtype, shape) in kinds.items()}
    write_tensors(tmp_path / "ours", {name: planned(tensor) for name, tensor in tensors.items()})
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def planned(tensor: torch.Tensor) -> Planned:
    return Planned(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def test_a_transposed_tensor_is_written_as_it_reads(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    write_tensors(tmp_path / "file", {"x": planned(tensor)})
    assert torch.equal(load_file(tmp_path / "file")["x"], tensor)


def test_tensors_are_asked_for_one_after_the_other_in_the_order_of_the_file(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(name: str) -> torch.Tensor:
        asked.append(name)
        return torch.zeros(2)

    names = ["b", "c", "a"]
    write_tensors(tmp_path / "file", {n: Planned((2,), torch.float32, lambda n=n: load(n)) for n in names})  # type: ignore[misc]
    assert asked == sorted(names)


def test_a_file_that_fails_half_way_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"x": planned(torch.ones(3))})
    before = (tmp_path / "file").read_bytes()

    def fail() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path / "file", {"x": planned(torch.ones(3)), "y": Planned((2,), torch.float32, fail)})
    assert (tmp_path / "file").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
