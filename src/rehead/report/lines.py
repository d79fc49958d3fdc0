"""Progress as plain lines from time to time, for a log."""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console

from rehead.report.text import inert
from rehead.stages import Stage

SOON, EVERY, TICK = 2.0, 30.0, 0.5
"""Seconds: a stage shorter than SOON is not shown; after that no silence is longer than EVERY."""
Record = dict[str, Any]


def is_of(title: str, run: str) -> bool:
    """Return whether a line with this title is that of a run, or of one of its stages."""
    return title == run or title.startswith(f"{run}  ")


@dataclass
class _Doing:
    """Progress `done` of `total` at time `now`, first seen at `first`; `line` describes it without the time left."""

    first: int
    begun: float
    now: float
    done: int
    total: int | None
    line: str
    shown: bool

    def __str__(self) -> str:
        if self.total is None or not self.first < self.done < self.total:
            return self.line
        pace = (self.now - self.begun) / (self.done - self.first)
        left = pace * (self.total - self.done) - (time.monotonic() - self.now)
        return f"{self.line}  {timedelta(seconds=max(0, round(left)))} left"

    def reach(self, done: int, line: str) -> None:
        """Update the progress."""
        self.done, self.now, self.line = done, time.monotonic(), line


class PlainLines:
    """Prints a line per evaluation of a run, one when a stage takes long, and one after a long silence."""

    def __init__(self, console: Console, purpose: str) -> None:
        self._console, self._purpose = console, purpose
        self._doing: dict[str, _Doing] = {}
        self._last = time.monotonic()
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._reminder = threading.Thread(target=self._remind, daemon=True)

    def start(self) -> None:
        """Start the clock."""
        self._reminder.start()

    def stop(self) -> None:
        """Stop printing."""
        self._stopped.set()
        self._reminder.join()

    def stage(self, stage: Stage, title: str) -> None:
        """Update the progress of a stage under a title."""
        if stage.state == "begun":
            amount = "" if stage.total is None else f"  {stage.total:,} {stage.unit}"
            begun = time.monotonic()
            self._doing[title] = _Doing(0, begun, begun, 0, stage.total, f"{title}{amount}", shown=False)
        elif stage.state == "going":
            of = "" if stage.total is None else f"/{stage.total:,}"
            self._doing[title].reach(stage.done, f"{title}  {stage.done:,}{of} {stage.unit}")
        else:
            del self._doing[title]
        self._print_due()

    def run(self, record: Record, total: int, title: str, event: str) -> None:
        """Update a run of `total` steps with a record, and print its `event` if there is one."""
        step, now = record["step"], time.monotonic()
        doing = self._doing.setdefault(title, _Doing(step, now, now, step, total, title, shown=True))
        if "loss" in record:
            doing.reach(step, f"{title}  step {step}/{total}  loss {record['loss']:.4f}")
        if "train_loss" in record and record.get("event") != "end":
            losses = (key for key in ("train_loss", "val_loss") if key in record)
            state = "  ".join(f"{key.replace('_', ' ')} {record[key]:.4f}" for key in losses)
            doing.reach(step, f"{title}  step {step}/{total}  {state}")
            self.say(str(doing))
        elif event:
            self.say(f"{title}  {event}")
        self._print_due()

    def say(self, text: str, *, faint: bool = False) -> None:
        """Print a line."""
        with self._lock:
            self._print(text)

    def forget(self, title: str) -> None:
        """Remove a run that has ended, with what is left of its stages."""
        self._doing = {key: doing for key, doing in self._doing.items() if not is_of(key, title)}

    def _print(self, text: object) -> None:
        self._last = time.monotonic()
        self._console.print(inert(str(text)), soft_wrap=True)

    def _print_due(self) -> None:
        """Print what is due: stages longer than `SOON`, and everything after a silence."""
        with self._lock:
            now = time.monotonic()
            silent, doing = now - self._last >= EVERY, list(self._doing.values())
            due = [each for each in doing if silent or not (each.shown or now - each.begun < SOON)]
            if self._purpose and (due or silent):
                self._print(self._purpose)
                self._purpose = self._purpose if not due else ""
            for each in due:
                each.shown = True
                self._print(each)

    def _remind(self) -> None:
        """Run in a thread: print what is due while the work itself is silent."""
        while not self._stopped.wait(TICK):
            self._print_due()
