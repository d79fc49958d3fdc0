"""Standard output and errors that are closed, full, or that nobody reads any longer."""

import io
import os
import sys
from typing import Any


class _Lossy(io.FileIO):
    """A file in which what cannot be written is lost."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except OSError:
            written = None  # as of a full pipe that does not wait
        return memoryview(data).nbytes if written is None else written


def replace_streams() -> None:
    """Discard output to streams that are closed, and escape characters that the encoding of others lacks."""
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def lose_errors() -> None:
    """Let the work go on where progress and warnings cannot be written: `2>&1 | head`, or a log on a full disk."""
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        lossy = io.BufferedWriter(_Lossy(sys.stderr.fileno(), "wb", closefd=False))
        sys.stderr.flush()
        sys.stderr = io.TextIOWrapper(
            lossy, encoding=sys.stderr.encoding, errors=sys.stderr.errors, line_buffering=True
        )


def discard_stdout() -> None:
    """Redirect a full or closed stdout, or the interpreter would fail to flush it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
