"""Ctrl-C and SIGTERM from the first instruction on: one word on stderr, and exit status 130 or 143."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # its half in C: the other one imports for longer than all that comes before

WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
HERE = os.path.dirname(__file__)
AGAIN = 0.02
"""Seconds until an import is asked again whether it has ended."""


def answer_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt with their number, but never inside an import.

    An exception that cuts an import short leaves half a module and comes out as any other error. While a
    command still imports what it needs nothing has begun, and the process ends at once; an import further
    down is waited for. A background job of a shell script inherits an ignored SIGINT: it answers too.
    """
    for number in WORDS:
        signal.signal(number, _stop)


def ignore_interrupt() -> None:
    """For the last moments, when the result has been printed and only the interpreter is to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stop(number: int, frame: "FrameType | None") -> None:
    importer = _importer(frame)
    if importer is None:
        raise KeyboardInterrupt(number)
    if os.path.dirname(importer.f_code.co_filename) == HERE:
        os.write(2, f"{WORDS[number]}\n".encode())
        os._exit(128 + number)
    signal.signal(signal.SIGALRM, lambda _, later: _stop(number, later))
    signal.setitimer(signal.ITIMER_REAL, AGAIN)


def _importer(frame: "FrameType | None") -> "FrameType | None":
    """Whose import is under way: the outermost one, for imports import each other."""
    found = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            found = frame.f_back
        frame = frame.f_back
    return found
