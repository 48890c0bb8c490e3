"""Two checkpoints that differ in as many linears as one likes, all alike, and the manifest that names them."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.models import write_llama_config

SIZE, RANK = 192, 64  # 74 kB a weight and side, 49 kB its factors
MANIFEST = f"""\
version: 1
repo: o/pico
license: apache-2.0
variants:
  - path: /
    label: Pico
    source: {{path: pair/source}}
    base: {{path: pair/base}}
    model_class: LlamaForCausalLM
    adapter: {{method: svd, rank: {RANK}, dtype: bfloat16, layout: pattern, task_type: CAUSAL_LM}}
card: {{template: lora_card.md.j2, title: Pico, summary: One adapter.}}
"""


def make_pair(folder: Path, *, modules: int) -> None:
    """A manifest, and two checkpoints that differ in so many linears."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(SIZE, SIZE, generator=generator)
    left, right = (torch.randn(*shape, generator=generator) for shape in ((SIZE, RANK), (RANK, SIZE)))
    weights = {"base": base.bfloat16(), "source": (base.bfloat16().float() + 0.1 * left @ right).bfloat16()}
    for side, weight in weights.items():
        (folder / "pair" / side).mkdir(parents=True)
        write_llama_config(folder / "pair" / side, size=SIZE, layers=modules)
        tensors = {f"model.layers.{index}.mlp.up_proj.weight": weight.clone() for index in range(modules)}
        save_file(tensors, folder / "pair" / side / "model.safetensors")
    (folder / "pico.yaml").write_text(MANIFEST)
