"""A merged fine-tune and its base, made on the spot in two seconds, for the other examples to work on.

A Llama of four small layers, a LoRA of rank 8 on three of its linears, and PEFT's own merge in bfloat16: what a
publisher of a fine-tune does, in small.

    python examples/small_pair.py models        # writes models/base and models/tuned
"""

import sys
from pathlib import Path

import peft
import torch
import transformers

RANK = 8
TARGETS = ("q_proj", "v_proj", "down_proj")


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Write the two checkpoints, and return the folders of base and tuned."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=96, intermediate_size=192, num_hidden_layers=4, num_attention_heads=6
    )
    base = transformers.LlamaForCausalLM(config).bfloat16()
    base.save_pretrained(folder / "base")
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=16, target_modules=list(TARGETS), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(base, settings).merge_and_unload()
    tuned.save_pretrained(folder / "tuned")
    return folder / "base", folder / "tuned"


if __name__ == "__main__":
    make_pair(Path(sys.argv[1]))
