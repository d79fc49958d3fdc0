"""How far long work is, as plain lines now and then: for a log, where nobody watches."""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console

from rehead.stages import Stage

SOON, EVERY, TICK = 3.0, 30.0, 0.5
"""Seconds: a stage that takes less than the first is not told of; then no silence is longer than the second."""
Record = dict[str, Any]


@dataclass
class _Doing:
    """`done` of `total`, seen since it was at `first`; `line` says so, but for the time left."""

    first: int
    begun: float
    done: int
    total: int | None
    line: str
    told: bool

    def __str__(self) -> str:
        if self.total is None or not self.first < self.done < self.total:
            return self.line
        pace = (time.monotonic() - self.begun) / (self.done - self.first)
        return f"{self.line}  {timedelta(seconds=round(pace * (self.total - self.done)))} left"


class PlainLines:
    """A line at each evaluation of a run, one as soon as a stage takes long, and one after every long silence."""

    def __init__(self, console: Console, work: str) -> None:
        self._console, self._work = console, work
        self._doing: dict[str, _Doing] = {}
        self._last = time.monotonic()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._reminder = threading.Thread(target=self._remind, daemon=True)

    def start(self) -> None:
        """Begin to count the seconds."""
        self._reminder.start()

    def stop(self) -> None:
        """Say no more."""
        self._stopped.set()
        self._reminder.join()

    def stage(self, stage: Stage, title: str) -> None:
        """What a stage is at, under a title."""
        if stage.state == "begun":
            much = "" if stage.total is None else f"  {stage.total:,} {stage.unit}"
            begun = time.monotonic()
            self._doing[title] = _Doing(0, begun, 0, stage.total, f"{title}{much}", told=False)
        elif stage.state == "going":
            of = "" if stage.total is None else f"/{stage.total:,}"
            doing = self._doing[title]
            doing.done, doing.line = stage.done, f"{title}  {stage.done:,}{of} {stage.unit}"
        else:
            del self._doing[title]
        self._tell()

    def run(self, record: Record, total: int, title: str, event: str) -> None:
        """One more record of a run, which is to take `total` steps, and what it says of an `event`."""
        step, now = record["step"], time.monotonic()
        doing = self._doing.setdefault(title, _Doing(step, now, step, total, title, told=True))
        if "loss" in record:
            doing.done, doing.line = step, f"{title}  step {step}/{total}  loss {record['loss']:.4f}"
        if "train_loss" in record and record.get("event") != "end":
            losses = (key for key in ("train_loss", "val_loss") if key in record)
            state = "  ".join(f"{key.replace('_', ' ')} {record[key]:.4f}" for key in losses)
            doing.done, doing.line = step, f"{title}  step {step}/{total}  {state}"
            self.say(str(doing))
        elif event:
            self.say(f"{title}  {event}")
        self._tell()

    def say(self, text: str, *, faint: bool = False) -> None:
        """Print a line, long or short."""
        with self._lock:
            self._print(text)

    def forget(self, title: str) -> None:
        """A run is over."""
        self._doing.pop(title, None)

    def _print(self, text: object) -> None:
        self._last = time.monotonic()
        self._console.print(str(text), soft_wrap=True, markup=False)

    def _tell(self) -> None:
        """Print what is due: what takes longer than `SOON`, and everything after a silence."""
        with self._lock:
            now = time.monotonic()
            silent, doing = now - self._last >= EVERY, list(self._doing.values())
            due = [one for one in doing if silent or not (one.told or now - one.begun < SOON)]
            if self._work and (due or silent):
                self._print(self._work)
                self._work = self._work if not due else ""
            for one in due:
                one.told = True
                self._print(one)

    def _remind(self) -> None:
        """The life of a thread: work may be long without a word."""
        while not self._stopped.wait(TICK):
            self._tell()
