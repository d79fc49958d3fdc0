"""What the process does with memory that is freed: keep it for the next step, or give it back.

glibc's malloc gives blocks back to the system or keeps them by thresholds that it adapts to what it has seen.
Elsewhere than on glibc nothing happens here.
"""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT, LARGEST, LARGE = 2**31 - 1, 2**25, 2**20
"""Bytes: kept at most; of the largest block that is ever kept, which is glibc's limit; of a large block."""


def keep_freed_memory() -> None:
    """For training: activations freed after a step are not returned to the system only to be faulted in again.

    That was a tenth of a step of the homework's model (docs/log.md). What earlier work has freed goes back first.
    """
    _set(mapped=LARGEST, kept=KEPT)


def return_freed_memory() -> None:
    """For conversions: a weight that is done with is the system's again, so that many do not add up."""
    _set(mapped=LARGE, kept=LARGE)


def _set(*, mapped: int, kept: int) -> None:
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
        library.malloc_trim(0)
        library.mallopt(MMAP_THRESHOLD, mapped)
        library.mallopt(TRIM_THRESHOLD, kept)
