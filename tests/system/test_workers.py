"""Processes that work for this one."""

import os
import signal
import time
from functools import partial

import pytest

from rehead.errors import ResourceError
from rehead.system import workers


def sleep(seconds):
    time.sleep(seconds)
    return seconds


def meet(place, first):
    """Write a file or, for what is to end later, wait for it."""
    until = time.monotonic() + 60
    while not first and not place.exists() and time.monotonic() < until:
        time.sleep(0.01)
    if first:
        place.touch()
    else:
        time.sleep(0.3)
    return first


def test_what_ends_first_is_yielded_first(tmp_path):
    assert list(workers.spread(partial(meet, tmp_path / "met"), [False, True], 2)) == [True, False]


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
