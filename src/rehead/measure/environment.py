"""Versions and hardware, for bug reports and beside every measurement."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from rehead import __version__

PACKAGES = ("numpy", "safetensors", "tokenizers", "cyclopts")


def environment() -> dict[str, str | int]:
    """What a number depends on beside the code."""
    facts: dict[str, str | int] = {
        "rehead": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "torch threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return facts | {name: version(name) for name in PACKAGES}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
