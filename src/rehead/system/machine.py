"""This machine's processor and memory."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    """Return the processor's name as the system reports it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> str:
    """Return a text that identifies what a compiler's `-march=native` means on this machine."""
    return f"{platform.machine()} {platform.processor()} {_cpuinfo('flags', 'Features')}"


def _cpuinfo(*fields: str) -> str:
    """Return the first value of one of these fields, or an empty text."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")
