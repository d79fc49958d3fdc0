"""Handles Ctrl-C, SIGTERM and SIGHUP from the start: one word on stderr, and exit status 130, 143 or 129."""

import _thread
import os
import time

from rehead.system.hangup import TOGETHER, leave_terminal

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # the C half: importing `signal` takes longer than everything before it

WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
HERE = os.path.dirname(__file__)
AGAIN = 0.02
"""Seconds between two checks whether an import has ended."""

PATIENCE = 1.5
"""Seconds that a C++ call may keep running after a signal: Python's handler runs only when it returns."""
_answered: list[float] = []
"""When the signal came that ends the command; nothing before."""


def answer_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt with their number, but never inside an import.

    An exception inside an import leaves half a module and surfaces as an unrelated error. While a command
    imports what it needs, nothing has begun, so the process exits immediately; a later import is waited for.
    A background job of a shell script inherits an ignored SIGINT: it gets the handler, too. An ignored SIGHUP (nohup)
    stays ignored. A second signal ends the process at once, and so does one that a long call of C++ keeps waiting.
    """
    for number in WORDS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _thread.start_new_thread(_watch, (reader,))


def ignore_signals() -> None:
    """Ignore signals once the result has been printed and the interpreter shuts down."""
    for number in WORDS:
        signal.signal(number, signal.SIG_IGN)


def _watch(reader: int) -> None:
    """End the process if a signal for `_stop` is not answered in time: nothing is lost that can be saved.

    What was answered may take its time to clean up, and a run that handles the signal itself to save.
    """
    while True:
        for number in os.read(reader, 1):
            if number in WORDS and signal.getsignal(number) is _stop:
                again = _is_again(number)
                time.sleep(PATIENCE)
                if (again or not _answered) and signal.getsignal(number) is _stop:
                    _end(number)


def _is_again(number: int) -> bool:
    """Whether a signal came after the one that was answered, not with it: the shell and the terminal may both send."""
    return bool(_answered) and number != signal.SIGHUP and time.monotonic() > _answered[0] + TOGETHER


def _end(number: int) -> None:
    try:
        os.write(2, f"{WORDS[number]}\n".encode())
    finally:  # also where nobody reads it
        os._exit(128 + number)


def _stop(number: int, frame: "FrameType | None") -> None:
    if number == signal.SIGHUP:
        leave_terminal()
    if _is_again(number):
        _end(number)
    if not _answered:
        _answered.append(time.monotonic())
        _interrupt(number, frame)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    importer = _importer(frame)
    if importer is None:
        raise KeyboardInterrupt(number)
    if os.path.dirname(importer.f_code.co_filename) == HERE:
        _end(number)
    signal.signal(signal.SIGALRM, lambda _, later: _interrupt(number, later))
    signal.setitimer(signal.ITIMER_REAL, AGAIN)


def _importer(frame: "FrameType | None") -> "FrameType | None":
    """Return the frame of the outermost import in progress, None outside an import."""
    importer = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            importer = frame.f_back
        frame = frame.f_back
    return importer
