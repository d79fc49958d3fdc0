"""Standard output and errors of a process whose terminal is gone. Imports little: signals need it at once."""

import os

S_IFMT, S_IFCHR = 0o170000, 0o020000
TOGETHER = 0.3
"""Seconds within which two signals are one: `timeout` and others send theirs to a process and to its group."""


def leave_terminal() -> None:
    """Discard output to the terminal: after SIGHUP it is gone, and writing to it may fail."""
    for number in (1, 2):
        try:
            if os.fstat(number).st_mode & S_IFMT == S_IFCHR:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, number)
                os.close(null)
        except OSError:  # closed already
            pass
