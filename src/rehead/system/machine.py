"""What this machine is: its processor and its memory."""

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def physical_memory() -> int:
    """Bytes of memory this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    """The processor's name, as the system gives it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> str:
    """What a compiler's `-march=native` means here."""
    return f"{platform.machine()} {platform.processor()} {_cpuinfo('flags', 'Features')}"


def _cpuinfo(*fields: str) -> str:
    """The first value of one of these fields; empty where there is none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")
