"""Memory depends on the largest tensor, not on how many there are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models import write_llama_config

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
SIZE, RANK = 1536, 256  # 4.7 MB a weight and side, 1.6 MB its factors
EQUAL = (24, SIZE, SIZE)  # 113 MB a side
SLACK = 100e6  # bytes: what an allocator keeps by it differs from run to run, by up to 60 MB
MANIFEST = f"""\
version: 1
repo: o/pico
license: apache-2.0
variants:
  - path: /
    label: Pico
    source: {{path: source}}
    base: {{path: base}}
    model_class: LlamaForCausalLM
    adapter: {{method: svd, rank: {RANK}, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}}
card: {{template: lora_card.md.j2, title: Pico, summary: One adapter.}}
"""
COMMAND = """
import re, sys
from pathlib import Path
from publisher.cli.app import cli
cli(["-m", "pico.yaml", "--until", "extract", "--device", "cpu"], standalone_mode=False)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""  # the kernel's own figure: what getrusage says of a child starts from its parent's peak


def peak_of_extraction(folder: Path, *, modules: int, equal: bool) -> int:
    """Peak resident bytes of the whole command on a pair with so many changed weights."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(SIZE, SIZE, generator=generator)
    left, right = (torch.randn(*shape, generator=generator) for shape in ((SIZE, RANK), (RANK, SIZE)))
    weights = {"base": base.bfloat16(), "source": (base.bfloat16().float() + 0.1 * left @ right).bfloat16()}
    same = {"model.vision.weight": torch.ones(EQUAL, dtype=torch.bfloat16)} if equal else {}
    for side, weight in weights.items():
        (folder / side).mkdir(parents=True)
        write_llama_config(folder / side, size=SIZE, layers=modules)
        names = (f"model.layers.{index}.mlp.up_proj.weight" for index in range(modules))
        save_file({name: weight.clone() for name in names} | same, folder / side / "model.safetensors")
    (folder / "pico.yaml").write_text(MANIFEST)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1]) * 1024


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    """With four changed weights, so that reading ahead and writing behind are under way, and nothing else."""
    return peak_of_extraction(tmp_path_factory.mktemp("least"), modules=4, equal=False)


def test_six_times_the_weights_take_no_more_memory(least: int, tmp_path: Path) -> None:
    more = peak_of_extraction(tmp_path, modules=24, equal=False)
    assert more < least + SLACK, f"{least / 1e6:.0f} MB became {more / 1e6:.0f} MB; all pairs and factors are 264 MB"


def test_a_large_tensor_that_is_equal_takes_no_memory(least: int, tmp_path: Path) -> None:
    more = peak_of_extraction(tmp_path, modules=4, equal=True)
    assert more < least + SLACK, f"{least / 1e6:.0f} MB became {more / 1e6:.0f} MB; the tensor is 226 MB on both sides"
