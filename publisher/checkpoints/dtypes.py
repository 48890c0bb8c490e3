"""The dtypes of safetensors in torch."""

from typing import TYPE_CHECKING

from publisher.border.safetensors_header import DTYPES
from publisher.checkpoints.headers import TensorHeader
from publisher.errors import FetchError

if TYPE_CHECKING:
    import torch


def torch_dtype(header: TensorHeader) -> "torch.dtype":
    """The dtype of a tensor in memory.

    Raises:
        FetchError: torch has none for it.
    """
    import torch

    found = getattr(torch, DTYPES.get(header.dtype, ("", 0))[0], None)
    if not isinstance(found, torch.dtype):
        raise FetchError(
            f"{header.file} holds tensors of dtype {header.dtype}, which torch {torch.__version__} cannot read",
            expected=f"one of {', '.join(DTYPES)}",
            next_step="name a checkpoint in another format, or update torch",
        )
    return found
