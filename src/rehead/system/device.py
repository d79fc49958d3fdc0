"""Devices: choosing one, and waiting for it."""

import torch

from rehead.errors import UsageError
from rehead.system.machine import available_memory


def choose_device(name: str) -> torch.device:
    """Return cuda or, without it, cpu for `auto`, else the named device.

    Raises UsageError if this machine lacks it, and for mps, which has no float64.
    """
    available = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    if name == "auto":
        return torch.device(available[0])
    kind, _, index = name.partition(":")
    if kind == "mps":
        raise UsageError(
            f"device={name}: rehead computes angles of rope and sums of losses in float64, which mps does not have. "
            "Use cpu."
        )
    if kind not in available:
        names = ", ".join(available)
        raise UsageError(f"device={name}: this machine has {names}. Use one of them, or auto.")
    if name == kind:
        return torch.device(name)
    if kind != "cuda" or not index.isdigit():
        raise UsageError(f"device={name}: only cuda devices have numbers, as in cuda:0. Use {kind}, or auto.")
    if int(index) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UsageError(f"device={name}: this machine has cuda:0 to cuda:{last}. Use one of them, or auto.")
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device; a CPU has the machine's."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return available_memory()
