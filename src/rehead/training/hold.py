"""A folder that one process writes at a time."""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rehead.checkpoint.files.publish import require_folders
from rehead.data.files import resource
from rehead.errors import Busy

LOCK = ".lock"


@contextmanager
def hold(folder: Path, kept: Callable[[], bool]) -> Iterator[None]:
    """Hold `folder` for this process, and make it where it is not there.

    Unless it is to be `kept` at the end, what was made goes again. Raises Busy, at once, where another
    process holds it.
    """
    require_folders(folder / LOCK)
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    with resource(f"cannot write in {folder}", "choose another system.work_dir"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    with lock:
        _claim(folder, lock)
        try:
            yield
        finally:
            if not kept():
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # somebody else uses one of them
                    for place in made:
                        place.rmdir()


def _claim(folder: Path, lock: TextIO) -> None:
    """Lock the folder for this process, and say in it whose it is."""
    with resource(f"cannot lock {folder}", "choose a system.work_dir on another disk"):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK)):
                raise BlockingIOError  # another one was refused at this moment, and has removed it
        except (BlockingIOError, FileNotFoundError) as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise Busy(
                f"{folder} is being written by {owner}: wait for it, or choose another system.work_dir."
            ) from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}")
        lock.flush()
