"""Exchanges the names of two folders atomically by a system call that Python does not expose."""

import ctypes
import errno
import os
import sys
from pathlib import Path

FUNCTION = "renameatx_np" if sys.platform == "darwin" else "renameat2"
HERE = -2 if sys.platform == "darwin" else -100
"""AT_FDCWD: a relative path begins at the working folder."""
EXCHANGE = 2
"""RENAME_SWAP of macOS and RENAME_EXCHANGE of Linux."""


def exchange(one: Path, other: Path) -> None:
    """Give each of two existing paths the name of the other, atomically.

    Raises OSError if the system or the file system cannot.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), FUNCTION, None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(HERE, os.fsencode(one), HERE, os.fsencode(other), ctypes.c_uint(EXCHANGE)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(one))
