"""Folders that are written aside, locked by their writer, and swept once it has died."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ASIDE = ".tmp-rehead-"
"""Prefix of the folders' names."""


@contextmanager
def aside(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new folder in `parent`, for the files of `name`; remove what is left of it at the end.

    The folders of writers that were killed are removed first. Raises OSError if the folder cannot be created.
    """
    sweep(parent.glob(f"{ASIDE}*"))
    folder, handle = _locked(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def sweep(places: Iterable[Path]) -> None:
    """Remove the files and folders among `places` that no living process has locked.

    A place whose file system has no locks stays.
    """
    for place in places:
        with suppress(OSError):
            handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if place.is_dir():
                    shutil.rmtree(place, ignore_errors=True)
                else:
                    place.unlink()
            finally:
                os.close(handle)


def lock(file: int | IO[bytes]) -> None:
    """Lock an open file or folder for as long as this process lives and has it open, if its file system can.

    The lock is shared, because NFS grants no other on a folder; `sweep` asks for an exclusive one.
    """
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)


def _locked(parent: Path, name: str) -> tuple[Path, int]:
    """Create and lock a folder. One that was swept before it was locked is given up for another."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{ASIDE}{name[:50]}-", dir=parent))
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except BaseException:
            folder.rmdir()
            raise
        lock(handle)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), folder.stat()):
                return folder, handle
        os.close(handle)
