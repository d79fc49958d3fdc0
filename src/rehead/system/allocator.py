"""Tells glibc's malloc to keep freed memory for the next step, or to return it to the system.

By default malloc decides by thresholds that it adapts as the process runs. Without glibc these functions do nothing.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT, LARGEST, LARGE = 2**31 - 1, 2**25, 2**20
"""Bytes: the most that is kept; the largest block that glibc can keep; a large block."""


def keep_freed_memory() -> None:
    """Keep activations that a training step frees, so that the next step does not fault their pages in again.

    Such faults took a tenth of a step of the default model (docs/log.md). Memory freed before is returned first.
    """
    _set(mapped=LARGEST, kept=KEPT)


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep what is freed inside; return it at the end."""
    keep_freed_memory()
    try:
        yield
    finally:
        return_freed_memory()


def return_freed_memory() -> None:
    """Return freed memory to the system, so that the converted weights of a large model do not add up."""
    _set(mapped=LARGE, kept=LARGE)


def _set(*, mapped: int, kept: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
        library.malloc_trim(0)
        library.mallopt(MMAP_THRESHOLD, mapped)
        library.mallopt(TRIM_THRESHOLD, kept)
