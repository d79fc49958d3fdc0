"""The command line: one function per command, which only parses and prints; torch is imported when needed.

Importing this package imports no command, so that signals are handled before anything heavy is loaded.
"""

import atexit
import os
import sys
from typing import NoReturn

from rehead.cli.interrupt import answer_signals, ignore_signals
from rehead.system.torchrun import of_torchrun


def main(argv: list[str] | None = None) -> int:
    """Run one command line; return its exit status (see `rehead.errors`).

    Without `argv` this is the whole process: it runs `sys.argv`, answers signals, and ends a process of torchrun.
    """
    if argv is None:
        answer_signals()
    from rehead.cli.entry import main as run

    try:
        status = run(argv)
    except SystemExit as ended:  # of a process that follows the first one
        if argv is not None or of_torchrun() is None:
            raise
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if argv is None:
        ignore_signals()
        if of_torchrun() is not None:
            leave(status)
    return status


def leave(status: int) -> NoReturn:
    """End a process of torchrun with an exit status, without finalizing the interpreter.

    A thread of gloo may still wait for the GIL to release a tensor. Python 3.11 to 3.13 end such a thread during
    finalization, which C++ turns into an abort of the process (pytorch/pytorch#190489).
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


__all__ = ["main"]
