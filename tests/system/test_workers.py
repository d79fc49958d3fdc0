"""Processes that work for this one."""

import os
import signal
import time

import pytest

from rehead.errors import ResourceError
from rehead.system import workers


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def test_what_ends_first_is_yielded_first():
    assert list(workers.spread(sleep, [1.5, 0.0], 2)) == [0.0, 1.5]


def test_a_worker_killed_while_the_next_is_started(monkeypatch):
    """Before Python 3.12 the pool may be closed as broken while a process is started for it."""

    class Pool(workers.ProcessPoolExecutor):
        def _adjust_process_count(self):
            for number in self._processes:
                os.kill(number, signal.SIGKILL)
                until = time.monotonic() + 2
                while not self._call_queue._reader.closed and time.monotonic() < until:
                    time.sleep(0.01)
            super()._adjust_process_count()

    monkeypatch.setattr(workers, "ProcessPoolExecutor", Pool)
    with pytest.raises(ResourceError, match="one of 2 processes was killed"):
        list(workers.spread(sleep, [100.0, 100.0], 2))


@pytest.mark.parametrize("error", [OSError(11, "no process"), OSError("handle is closed")])
def test_no_process_can_be_started(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(workers.ProcessPoolExecutor, "submit", fail)
    with pytest.raises(OSError if error.errno else ResourceError):
        list(workers.spread(sleep, [0.0], 2))
