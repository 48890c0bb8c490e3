"""The yardstick of `whole.py`: a straightforward extractor, streamed and in float32, with a full thin SVD per tensor.

It does what extractors for merged fine-tunes commonly do, and no more: no comparison of what should be equal, no
noise floor, no check of the result, nothing kept for a run that dies. One line of JSON tells the seconds that each
tensor took, on the clock and of the processors.

    python -m benchmarks.full_svd SOURCE BASE OUTPUT RANK
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def main(source: Path, base: Path, *, output: Path, rank: int) -> None:
    """Extract every weight that differs between two safetensors files.

    Args:
        source: the file of the merged fine-tune.
        base: the file of its base.
        output: the file of factors to write.
        rank: columns to keep of each.
    """
    factors, clock, cpu = {}, {}, {}
    with safe_open(source, framework="pt") as sources, safe_open(base, framework="pt") as bases:
        for name in sources.keys():  # noqa: SIM118 - not a mapping
            start = time.perf_counter(), time.process_time()
            ours, theirs = sources.get_tensor(name), bases.get_tensor(name)
            if torch.equal(ours, theirs):
                continue
            u, s, vh = torch.linalg.svd(ours.float() - theirs.float(), full_matrices=False)
            root = s[:rank].sqrt()
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors[f"{module}.lora_B.weight"] = (u[:, :rank] * root).bfloat16().contiguous()
            factors[f"{module}.lora_A.weight"] = (root[:, None] * vh[:rank]).bfloat16().contiguous()
            clock[name], cpu[name] = time.perf_counter() - start[0], time.process_time() - start[1]
    save_file(factors, output)
    print(json.dumps({"clock": clock, "cpu": cpu}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), output=Path(sys.argv[3]), rank=int(sys.argv[4]))
