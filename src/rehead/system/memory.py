"""Refuses work that does not fit into the memory, before it begins."""

from collections.abc import Mapping

import torch

from rehead.errors import OutOfMemory
from rehead.system.device import free_memory


def require_memory(
    work: str, parts: Mapping[str, int | float], way_out: str, device: torch.device | None = None
) -> None:
    """Raise OutOfMemory if `work` takes more bytes than the device, by default the CPU, has free.

    The message has the sum, its `parts` by what holds them, what is free, and a way out.
    """
    need, have = sum(parts.values()), free_memory(device or torch.device("cpu"))
    if need > have:
        listed = ", ".join(f"{name} {_written(n_bytes)}" for name, n_bytes in parts.items() if n_bytes)
        raise OutOfMemory(
            f"{work} needs about {_written(need)} ({listed}), but only {_written(have)} are free. {way_out}"
        )


def _written(n_bytes: int | float) -> str:
    """Return bytes as a text: `1.3 GB`, or `12 MB` below 1 GB."""
    return f"{n_bytes / 1e9:,.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.0f} MB"
