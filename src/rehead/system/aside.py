"""Folders that are written aside, locked by their writer, flushed to disk, and swept once it has died."""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

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
        try:
            shutil.rmtree(folder, ignore_errors=True)
        finally:  # an interrupt comes anywhere
            os.close(handle)


def allowed() -> int:
    """Return the permissions of new folders. `os.umask` shows them by changing them, for all threads of the process."""
    with suppress(OSError):
        if found := re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 0o777 & ~int(found[1], 8)
    mask = os.umask(0)  # not Linux
    os.umask(mask)
    return 0o777 & ~mask


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(folder: Path) -> None:
    """Remove a folder, for others at once. What a kill leaves of it has another name, and is swept by `aside`."""
    gone = folder.with_name(f"{ASIDE}{folder.name}")
    shutil.rmtree(gone, ignore_errors=True)
    with suppress(OSError):  # a full disk: removed where it is
        folder = folder.rename(gone)
    shutil.rmtree(folder, ignore_errors=True)  # NFS keeps files that are still open


def sweep(places: Iterable[Path]) -> None:
    """Remove the files and folders among `places` that no living process has locked.

    A place whose file system has no locks stays.
    """
    for place in places:
        with suppress(OSError), locked(place):
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink()


@contextmanager
def locked(place: Path, *, shared: bool = False, needed: bool = True) -> Iterator[None]:
    """Lock a file or folder for this process: for its writer `shared`, as NFS grants no other lock on a folder.

    Raises BlockingIOError if a living process has locked it and, if a lock is `needed`, OSError where there is none.
    """
    handle = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if needed or isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(handle)


def _locked(parent: Path, name: str) -> tuple[Path, int]:
    """Create and lock a folder. One that was swept before it was locked is given up for another.

    The lock is shared, as NFS grants no other on a folder; `sweep` asks for an exclusive one.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{ASIDE}{name[:50]}-", dir=parent))
        with suppress(FileNotFoundError), ExitStack() as undo:
            undo.callback(shutil.rmtree, folder, ignore_errors=True)
            handle = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(handle), folder.stat()):
                undo.pop_all()
                return folder, handle
