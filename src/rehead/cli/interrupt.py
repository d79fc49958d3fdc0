"""Handles Ctrl-C and SIGTERM from the start: one word on stderr, and exit status 130 or 143."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # the C half: importing `signal` takes longer than everything before it

WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
HERE = os.path.dirname(__file__)
AGAIN = 0.02
"""Seconds between two checks whether an import has ended."""


def answer_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt with their number, but never inside an import.

    An exception inside an import leaves half a module and surfaces as an unrelated error. While a command
    imports what it needs, nothing has begun, so the process exits immediately; a later import is waited for.
    A background job of a shell script inherits an ignored SIGINT: it gets the handler, too.
    """
    for number in WORDS:
        signal.signal(number, _stop)


def ignore_interrupt() -> None:
    """Ignore SIGINT once the result has been printed and the interpreter shuts down."""
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
    """Return the frame of the outermost import in progress, None outside an import."""
    importer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importer = frame.f_back
        frame = frame.f_back
    return importer
