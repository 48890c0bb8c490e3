"""The device that the arithmetic runs on, and its name.

A device that this machine does not have is refused.
"""

import torch

from publisher.errors import ManifestError


def device_name(device: torch.device) -> str:
    """Return `cpu`, or the accelerator's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def chosen_device(name: str) -> torch.device:
    """Return the device of this name; `auto` is the first accelerator, or the CPU.

    Raises:
        ManifestError: it cannot be used on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ManifestError(
            f"--device {name} cannot be used here ({reason})", expected="auto, cpu, cuda or cuda:N"
        ) from None
    return device
