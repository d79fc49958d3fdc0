"""Signals of a run: Ctrl-C and SIGTERM ask it to save and stop; a second Ctrl-C stops it immediately."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """The signal that asked to stop, None until one has."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Record the first SIGINT or SIGTERM within the block instead of acting on it; restore the handlers at its end."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    again = before[signal.SIGINT]  # ignored in the background job of a shell script

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        signal.signal(signal.SIGINT, again if callable(again) else signal.default_int_handler)

    try:
        for number in before:
            signal.signal(number, note)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
