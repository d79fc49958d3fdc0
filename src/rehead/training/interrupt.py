"""Signals of a run: the first asks it to save and stop, a second Ctrl-C or SIGTERM stops it immediately."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from rehead.system.hangup import TOGETHER, leave_terminal

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Abandoned(BaseException):
    """Work that a signal ended before it had a result. No `except Exception` may swallow it."""


class Stop:
    """The signal that asked to stop, None until one has."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._may_raise = False

    def check(self) -> None:
        """Raise Abandoned if a signal has come."""
        if self.signal is not None:
            raise Abandoned

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Raise Abandoned at a signal before or within the block, which must leave nothing half changed."""
        try:
            self._may_raise = True
            self.check()
            yield
        finally:
            self._may_raise = False

    def note(self, number: int) -> None:
        """Record a signal; end the work in progress if it may be abandoned."""
        self.signal = self.signal or number
        if self._may_raise:
            self._may_raise = False
            raise Abandoned


@contextmanager
def stop_signals(stop: Stop | None = None) -> Iterator[Stop]:
    """Record SIGINT, SIGTERM and SIGHUP within the block instead of acting on them; restore the handlers at its end.

    After the first signal, SIGINT and SIGTERM act as before, unless they come with it. SIGHUP does not: a closing shell
    and its terminal may both send it, so a second one does not mean haste. An ignored SIGHUP (nohup) stays ignored.
    """
    stop = stop or Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in HANDLED}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, partial(_act, before[again], time.monotonic() + TOGETHER))
        stop.note(number)

    try:
        for number in before:
            signal.signal(number, note)
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _act(before: Any, since: float, number: int, frame: FrameType | None) -> None:
    """Do with a signal what its handler `before` does, but ignore one that comes before the time `since`."""
    if time.monotonic() >= since:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        # SIGINT is ignored in the background job of a shell script
        signal.signal(number, before if callable(before) else default)
        signal.raise_signal(number)
