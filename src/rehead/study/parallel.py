"""Runs several jobs in parallel, each in its own process with its share of the threads."""

import logging
import multiprocessing
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from rehead import native
from rehead.errors import Interrupted, OutOfMemory, ReheadError
from rehead.stages import listening
from rehead.study.failures import Failures
from rehead.study.job import Job
from rehead.study.preset import Preset
from rehead.study.sharing import Sharing
from rehead.study.work import run_job
from rehead.system.workers import end_with_parent, interrupt_held
from rehead.training.interrupt import HANDLED, stop_signals

Record = dict[str, Any]
TURN = 0.2
"""Seconds between two checks for a signal."""


def run_parallel(
    jobs: Sequence[Job],
    preset: Preset,
    n_process: int,
    watch: Callable[[Job, Record], None],
    failures: Failures,
) -> None:
    """Call `run_job` for every job, `n_process` at a time, parents first; pass all records to `watch`.

    SIGINT, SIGTERM and SIGHUP make every process save and exit, then Interrupted is raised; a second signal kills
    them. A job that fails is added to `failures`, and those that start from it are left out. Any other error of a
    process stops the others like a signal and is raised here.
    """
    n_process = min(n_process, len(jobs))
    threads = max(1, torch.get_num_threads() // n_process)
    kernels = native.mode()
    context = multiprocessing.get_context("spawn")
    waiting, running = list(jobs), dict[Connection, tuple[Job, BaseProcess]]()
    failure: Exception | None = None
    with _killed(running), stop_signals() as stop:
        while running or (waiting and failure is None):
            while failure is None and len(running) < n_process and (job := _ready(waiting, running)):
                waiting.remove(job)
                receiver, sender = context.Pipe()
                process: BaseProcess = context.Process(
                    target=_process, args=(job, preset, threads, kernels, sender)
                )
                with interrupt_held():
                    process.start()
                sender.close()
                running[receiver] = job, process
            if stop.signal is not None and failure is None:
                failure = stopped(stop.signal)
                _stop(running)
            for connection in wait(list(running), timeout=TURN):
                assert isinstance(connection, Connection)
                job, process = running[connection]
                try:
                    message = connection.recv()
                except EOFError:
                    process.join()
                    message = None if process.exitcode == 0 else _lost(process.exitcode)
                    del running[connection]
                if isinstance(message, Exception) and stop.signal is None and failures.add(job, message):
                    waiting = [job for job in waiting if not failures.stop(job)]
                    watch(job, {"event": "failed"})
                elif isinstance(message, Exception) and failure is None:
                    failure = message if stop.signal is None else stopped(stop.signal)
                    _stop(running)
                elif isinstance(message, str):
                    warnings.warn(f"{job.variant}: {message}", stacklevel=2)
                elif isinstance(message, dict):
                    watch(job, message)
    if failure is not None:
        raise failure


def _ready(waiting: Sequence[Job], running: dict[Connection, tuple[Job, BaseProcess]]) -> Job | None:
    """Return the first waiting job whose parent is neither waiting nor running."""
    busy = [*waiting, *(job for job, _ in running.values())]
    return next((job for job in waiting if job.parent not in busy), None)


def _stop(running: dict[Connection, tuple[Job, BaseProcess]]) -> None:
    for _, process in running.values():
        process.terminate()


@contextmanager
def _killed(running: dict[Connection, tuple[Job, BaseProcess]]) -> Iterator[None]:
    """Kill the processes still running when the block is left, as by a second signal; Python would wait for them."""
    try:
        yield
    finally:
        for _, process in running.values():
            process.kill()


def stopped(number: int) -> Interrupted:
    """Return the exception that a study raises when this signal asked it to stop."""
    return Interrupted("stopped, with every run saved: repeat the command to resume.", number)


def _lost(status: int | None) -> ReheadError:
    if status is not None and -status in HANDLED:  # sent to it and not, or not yet, to this process
        return stopped(-status)
    return OutOfMemory(
        f"its process ended with status {status}, perhaps because memory ran out: use fewer --jobs."
    )


class _Sent(logging.Handler):
    """Sends the warnings of the log to the study's process, as those of Python."""

    def __init__(self, out: Connection) -> None:
        super().__init__(logging.WARNING)
        self._out = out

    def emit(self, record: logging.LogRecord) -> None:
        self._out.send(record.getMessage())


def _process(job: Job, preset: Preset, threads: int, kernels: str, out: Connection) -> None:
    """Run one job in this process; send its records and warnings, and an error if there is one."""
    end_with_parent()
    torch.set_num_threads(threads)
    native.use(kernels)
    logging.getLogger("rehead").addHandler(_Sent(out))
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *where, **more: out.send(str(message))
        try:
            reporting = listening(lambda stage: out.send({"event": "stage", "stage": stage}))
            with reporting, Sharing(job.folder) as sharing:
                for record in run_job(job, preset, sharing):
                    out.send(record)
        except Interrupted as error:
            out.send(stopped(error.exit_code - 128))
        except ReheadError as error:
            out.send(error)
        except Exception as error:
            error.add_note(traceback.format_exc())
            out.send(error)
    out.close()
