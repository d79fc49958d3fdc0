"""Versions and hardware, for bug reports and measurements."""

import os
import platform
from importlib.metadata import version

import torch

from rehead import __version__
from rehead.system.machine import processor

PACKAGES = ("numpy", "safetensors", "tokenizers", "cyclopts")


def environment(device: torch.device | None = None) -> dict[str, str | int]:
    """Return the facts that a measurement, on `device` if it ran on one, depends on besides the code."""
    gpu = device if device is not None and device.type == "cuda" else None  # by default the current one
    facts: dict[str, str | int] = {
        "rehead": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name(gpu) if torch.cuda.is_available() else "none",
    }
    used = {} if device is None else {"device": str(device)}
    return facts | used | {name: version(name) for name in PACKAGES}
