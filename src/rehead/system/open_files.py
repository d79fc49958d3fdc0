"""How many files this process may have open at once."""

import resource
from contextlib import suppress

ENOUGH = 4096


def allow_open_files() -> None:
    """Raise the limit to 4,096, as far as the system lets a process: it is often 1,024, on macOS 256."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
