"""Files that are read at any time, a few of them open at once; one that changes in the meantime is refused."""

import hashlib
import os
import threading
import weakref
from io import BufferedReader
from pathlib import Path

from rehead.errors import IntegrityError

MOST_OPEN = 16
"""A process may often open 1,024 files, on macOS 256; large models have more."""
PIECE = 2**20


class OpenedFiles:
    """Reads files at any offset. The first `MOST_OPEN` - 1 stay readable after they are deleted.

    `add` records a file's size and modification time: a later read that finds others raises IntegrityError.
    """

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()  # one thread must not close what another reads
        weakref.finalize(self, _close, self._handles)

    def add(self, path: Path) -> BufferedReader:
        """Open a file for the first time, and return it as one to read its header from. Raises OSError."""
        with self._lock:
            handle = self._handle(path)
            self._stamps[path] = _stamp(handle)
            return os.fdopen(os.dup(handle), "rb")

    def read(self, path: Path, into: memoryview, offset: int) -> None:
        """Fill `into` with the bytes of a file from `offset`. Raises IntegrityError if that cannot be."""
        try:
            with self._lock:
                handle = self._handle(path)
                while into:  # one call reads 2 GiB at most
                    count = os.preadv(handle, [into], offset)
                    if not count:
                        raise IntegrityError(f"{path} was cut short while it was read.")
                    into, offset = into[count:], offset + count
                if _stamp(handle) != self._stamps[path]:
                    raise changed(path)
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}.") from error

    def sha256(self, path: Path) -> str:
        """Return the hex digest of a file's bytes. Raises IntegrityError if it has changed."""
        digest = hashlib.sha256()
        size, _ = self._stamps[path]
        for begin in range(0, size, PIECE):
            piece = bytearray(min(PIECE, size - begin))
            self.read(path, memoryview(piece), begin)
            digest.update(piece)
        return digest.hexdigest()

    def _handle(self, path: Path) -> int:
        """Return the open file; where too many are, the newest gives way, so that the first stay."""
        if path not in self._handles:
            if len(self._handles) == MOST_OPEN:
                os.close(self._handles.popitem()[1])
            self._handles[path] = os.open(path, os.O_RDONLY)
        return self._handles[path]


def changed(path: Path) -> IntegrityError:
    """Return the error of a file that is not what it was when it was opened."""
    return IntegrityError(
        f"{path} changed while it was read: nothing of it can be relied on. Start again when nothing writes to it."
    )


def _stamp(handle: int) -> tuple[int, int]:
    found = os.fstat(handle)
    return found.st_size, found.st_mtime_ns


def _close(handles: dict[Path, int]) -> None:
    for handle in handles.values():
        os.close(handle)
