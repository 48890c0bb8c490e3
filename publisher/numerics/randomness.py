"""Random numbers that depend on a name alone, so that the same tensor always gets the same."""

import hashlib

import torch
from torch import Tensor


def seeded(name: str, device: torch.device) -> torch.Generator:
    """Return a generator whose stream depends on this name and the kind of device alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
    return torch.Generator(device).manual_seed(seed)


def gaussian(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a standard normal matrix.

    Args:
        rows: of the matrix.
        columns: of the matrix.
        generator: what draws, on the device where the matrix is made.

    Returns:
        The matrix, (rows, columns), float32.
    """
    return torch.randn(rows, columns, generator=generator, device=generator.device)


def random_bytes(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform int8 numbers in the shape of `like`.

    Eight are made from each int64: to draw them one by one would take longer than all products with the matrix.
    """
    words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
    return words.random_(-(1 << 63), None, generator=generator).view(torch.int8)[: like.numel()].view(like.shape)
