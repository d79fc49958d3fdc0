"""This machine's processor and memory."""

import os
import platform
import re
import resource
from collections.abc import Iterator
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
CACHED = re.compile(r"^(?:total_)?((?:in)?active_file) (\d+)$", re.MULTILINE)
"""Pages of files in memory.stat, which a control group gives up when it needs memory (total_: with its subgroups)."""


def physical_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate without swapping or being killed.

    The least of what is free on the machine, in the control groups of this process (both versions) and below its own
    limit of address space (`ulimit -v`). `root` is where /proc and /sys are.
    """
    return max(0, min([_free(root), *_left_in_groups(root), *_left_of_addresses(root)]))


def _free(root: Path) -> int:
    """Return what is free or can be freed, or all memory where the system does not say."""
    info = root / "proc/meminfo"
    found = re.search(r"^MemAvailable: +(\d+) kB", info.read_text(), re.MULTILINE) if info.exists() else None
    return int(found[1]) * 1024 if found else physical_memory()


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what each control group with a limit has left: this process's and those around it."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
            limit, used = "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mounts = ["sys/fs/cgroup/memory"]
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for mount in mounts:
            inner = Path(path.lstrip("/"))
            for group in (inner, *inner.parents):
                yield from _left(root / mount / group, limit, used)


def _left(group: Path, limit: str, used: str) -> Iterator[int]:
    """Yield the limit of a group less what it uses, without pages that it can give up; nothing without a limit."""
    try:
        most, now = (group / limit).read_text().strip(), int((group / used).read_text())
        kept: dict[str, int] = {}
        for kind, size in CACHED.findall((group / "memory.stat").read_text()):
            kept[kind] = max(kept.get(kind, 0), int(size))
    except OSError:
        return
    if most != "max":
        yield int(most) - now + sum(kept.values())


def _left_of_addresses(root: Path) -> Iterator[int]:
    """Yield how many more bytes of addresses this process may use, if that is limited."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    sizes = root / "proc/self/statm"
    if most != resource.RLIM_INFINITY and sizes.exists():
        yield most - int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def processor() -> str:
    """Return the processor's name as the system reports it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instruction_sets() -> str:
    """Return a text that differs between machines for which `-march=native` means different things.

    A machine that does not list its instruction sets is told apart by its name.
    """
    sets = _cpuinfo("flags", "Features") or platform.node()
    return f"{platform.machine()} {platform.processor()} {' '.join(platform.libc_ver())} {sets}"


def _cpuinfo(*fields: str) -> str:
    """Return the first value of one of these fields, or an empty text."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(fields)), "")
