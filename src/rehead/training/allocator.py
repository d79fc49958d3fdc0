"""Memory that a training step frees stays with the process for the next step."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT, MAPPED = 2**31 - 1, 2**25
"""Up to 2 GB of free memory are kept; blocks below 32 MB, glibc's limit, come from it."""


def keep_freed_memory() -> None:
    """Stop glibc from returning activations to the system after every step, only to fault them in again.

    That was a tenth of a step of the homework's model (docs/log.md). What earlier work has freed goes back first.
    Elsewhere than on glibc nothing happens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
        library.malloc_trim(0)
        library.mallopt(MMAP_THRESHOLD, MAPPED)
        library.mallopt(TRIM_THRESHOLD, KEPT)
