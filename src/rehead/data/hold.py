"""A lock that lets one process at a time write to a folder."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rehead.checkpoint.files.publish import require_folders
from rehead.data.files import resource
from rehead.errors import Busy, InvalidInput, ReheadError
from rehead.system.aside import ASIDE, sweep

LOCK = ".lock"


@dataclass(frozen=True)
class Held:
    """A folder that this process has locked."""

    folder: Path
    lock: TextIO
    found: os.stat_result

    @property
    def is_valid(self) -> bool:
        """Whether the folder is still in place and no other process has locked it; its lock file may be gone."""
        try:
            return os.path.samestat(self.found, os.stat(self.folder)) and not self._is_taken()
        except OSError:
            return False

    def _is_taken(self) -> bool:
        with suppress(FileNotFoundError):
            return not os.path.samestat(os.fstat(self.lock.fileno()), os.stat(self.folder / LOCK))
        return False


@contextmanager
def hold(folder: Path, keep: Callable[[], bool], choose: str) -> Iterator[Held]:
    """Lock `folder` for this process, and create it if it does not exist.

    Unless `keep()` is True at the end, created folders are removed. Raises Busy immediately if another
    process holds the lock. `choose` names another way out: the option that says which folder.
    """
    require_folders(folder, itself=True)
    created = [place for place in (folder, *folder.parents) if not place.exists()]
    in_place = True
    try:  # before anything is created: an interrupt may come anywhere
        with resource(f"cannot write in {folder}", f"choose another {choose}"):
            folder.mkdir(parents=True, exist_ok=True)
            lock = _opened(folder / LOCK)
        with lock:
            _claim(folder, lock, choose)
            held = Held(folder, lock, os.stat(folder))
            try:
                yield held
            finally:
                in_place = held.is_valid
    finally:
        if in_place and not (folder.exists() and keep()):
            with suppress(OSError, ReheadError):  # not empty, or another process uses it
                _remove(folder, created, choose)


def _remove(folder: Path, created: list[Path], choose: str) -> None:
    """Remove the lock file and the created folders, unless another process holds the lock."""
    if (folder / LOCK).exists():
        with _opened(folder / LOCK) as lock:
            _claim(folder, lock, choose)
            (folder / LOCK).unlink()
    sweep(folder.glob(f"{ASIDE}*"))  # left by an interrupt
    for place in created:
        if place.exists():
            place.rmdir()


def _opened(file: Path) -> TextIO:
    """Open the lock file, whose content is replaced: a link, in a folder that somebody else made, may lead anywhere."""
    try:
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if file.is_symlink():
            raise InvalidInput(f"{file} is a link, and it would be written to. Remove it.") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InvalidInput(f"{file} is not a regular file, and it would be written to. Remove it.")
    return os.fdopen(handle, "a+", encoding="utf-8")


def _claim(folder: Path, lock: TextIO, choose: str) -> None:
    """Lock the folder for this process, and write its id into the lock file."""
    with resource(f"cannot lock {folder}", f"choose a {choose} on another disk"):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK)):
                raise BlockingIOError  # another process has just removed the lock file
        except (BlockingIOError, FileNotFoundError) as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise Busy(
                f"{folder} is being written by {owner}: wait for it, or choose another {choose}."
            ) from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {os.uname().nodename}")
        lock.flush()
