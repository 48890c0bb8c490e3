"""A loaded base with the weights that a QLoRA was trained on: those of a 4-bit quantisation, dequantised.

So the base needs no bitsandbytes here, and is the same on every machine. It refuses a model that lacks such a weight.
"""

from typing import Any

import torch

from publisher.checkpoints import nf4
from publisher.errors import ValidationError, counted
from publisher.records.checkpoint import QuantisedBase


def set_quantised(model: Any, how: QuantisedBase | None) -> None:
    """Set the weights of a model to what they are once quantised and dequantised.

    Args:
        model: of transformers, with the base's weights.
        how: the quantisation; None leaves the model as it is.

    Raises:
        ValidationError: the model has none of these weights, or lacks some.
    """
    if how is None:
        return
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lost = [name for name in how.tensors if name not in parameters]
    if lost:
        raise ValidationError(
            f"{type(model).__name__} lacks {counted(len(lost), 'weight')} of the quantised base, the first {lost[0]}",
            expected="the class that the base's checkpoint is of",
            next_step="correct model_class in the manifest",
        )
    with torch.no_grad():
        for name in how.tensors:
            weight = parameters[name]
            weight.copy_(nf4.dequantised(weight, how.way))
