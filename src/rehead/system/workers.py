"""Processes that work for this one, and end with it."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

from rehead.errors import ResourceError

T = TypeVar("T")
R = TypeVar("R")
FROM_TERMINAL = {signal.SIGINT, signal.SIGHUP}


def spread(work: Callable[[T], R], tasks: Iterable[T], n_process: int) -> Iterator[R]:
    """Yield `work(task)` for every task as it ends, `n_process` at a time in processes of their own.

    One task is drawn ahead of those that run. Raises what `work` raises, and ResourceError if a process is killed; the
    others are then killed, too.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(n_process, context, initializer=end_with_parent)
    running = set[Future[R]]()
    try:
        for task in tasks:
            if len(running) == n_process:
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in ended)
            with interrupt_held():
                running.add(_submit(pool, work, task))
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in ended)
    except BrokenProcessPool:
        raise ResourceError(
            f"one of {n_process} processes was killed, perhaps because memory ran out: use fewer --jobs."
        ) from None
    finally:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[T], R], task: T) -> Future[R]:
    try:
        return pool.submit(work, task)
    except OSError as error:
        # Pythons before 3.12 may close the pipes of a broken pool while a process is started for it; that has no errno
        if error.errno is None:
            raise BrokenProcessPool from error
        raise


@contextmanager
def interrupt_held() -> Iterator[None]:
    """Block SIGINT and SIGHUP in processes started here: a terminal sends them to all, only the parent handles them.

    Starting the first process would start Python's resource tracker, which unblocks signals, so it is started before.
    """
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_TERMINAL)


def end_with_parent() -> None:
    """End this process when its parent has ended, even by SIGKILL."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
