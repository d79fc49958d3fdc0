"""Ctrl-C and SIGTERM ask a run to save and stop; a second Ctrl-C stops it at once."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Which signal has asked to stop, None as long as none has."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within the block the first SIGINT or SIGTERM is only noted; handlers are put back at its end."""
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
