"""How far long work is, as plain lines now and then: for a log, where nobody watches."""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console

from rehead.stages import Stage

QUIET, EVERY = 5.0, 30.0
"""Seconds: what takes less than the first says nothing; afterwards no silence is longer than the second."""
Record = dict[str, Any]


@dataclass
class _Doing:
    """`done` of `total`, seen since it was at `first`; `line` says so, but for the time left."""

    first: int
    begun: float
    done: int
    total: int | None
    line: str

    def __str__(self) -> str:
        if self.total is None or not self.first < self.done < self.total:
            return self.line
        pace = (time.monotonic() - self.begun) / (self.done - self.first)
        return f"{self.line}  {timedelta(seconds=round(pace * (self.total - self.done)))} left"


class PlainLines:
    """A line as each stage begins and at each evaluation of a run, and one where nothing was said for a while."""

    def __init__(self, console: Console, work: str) -> None:
        self._console, self._work = console, work
        self._doing: dict[str, _Doing] = {}
        self._quiet, self._stopped = True, False
        self._said = threading.Event()
        self._reminder = threading.Thread(target=self._remind, daemon=True)

    def start(self) -> None:
        """Begin to count the seconds."""
        self._reminder.start()

    def stop(self) -> None:
        """Say no more."""
        self._stopped = True
        self._said.set()
        self._reminder.join()

    def stage(self, stage: Stage, title: str) -> None:
        """What a stage is at, under a title."""
        of = "" if stage.total is None else f"/{stage.total:,}"
        if stage.state == "begun":
            much = "" if stage.total is None else f"  {stage.total:,} {stage.unit}"
            self._doing[title] = _Doing(0, time.monotonic(), 0, stage.total, f"{title}{much}")
            if not self._quiet:
                self._print(self._doing[title])
        elif stage.state == "going":
            doing = self._doing[title]
            doing.done, doing.line = stage.done, f"{title}  {stage.done:,}{of} {stage.unit}"
        else:
            del self._doing[title]

    def run(self, record: Record, total: int, title: str, event: str) -> None:
        """One more record of a run, which is to take `total` steps, and what it says of an `event`."""
        step = record["step"]
        doing = self._doing.setdefault(title, _Doing(step, time.monotonic(), step, total, title))
        if "loss" in record:
            doing.done, doing.line = step, f"{title}  step {step}/{total}  loss {record['loss']:.4f}"
        if "train_loss" in record and record.get("event") != "end":
            losses = (key for key in ("train_loss", "val_loss") if key in record)
            state = "  ".join(f"{key.replace('_', ' ')} {record[key]:.4f}" for key in losses)
            doing.done, doing.line = step, f"{title}  step {step}/{total}  {state}"
            self._print(doing)
        elif event:
            self._print(f"{title}  {event}")

    def say(self, text: str, *, faint: bool) -> None:
        """Print a line, long or short."""
        self._print(text)

    def forget(self, title: str) -> None:
        """A run is over."""
        self._doing.pop(title, None)

    def _print(self, text: object) -> None:
        self._quiet = False
        self._console.print(str(text), soft_wrap=True, markup=False)
        self._said.set()

    def _remind(self) -> None:
        """The life of a thread: say what is being done whenever nothing was said for too long."""
        patience = QUIET
        while not self._stopped:
            if not self._said.wait(patience):
                work = [self._work] if self._work and (self._quiet or not self._doing) else []
                self._quiet = False
                for line in (*work, *self._doing.values()):
                    self._print(line)
            self._said.clear()
            patience = EVERY
