"""The records of one or several runs as live lines on a terminal, or as a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from rehead.report.text import wrapped

WIDE = 100
"""Characters of a terminal that has room for a bar; steps and time left stand in any."""
T = TypeVar("T")
Record = dict[str, Any]


class Board:
    """A line per run on stderr: steps, time left, loss, validation loss, time per step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._tasks: dict[str, TaskID] = {}
        self._seen: dict[str, Record] = {}
        self._begun: dict[str, tuple[int, float]] = {}
        columns: list[ProgressColumn] = [
            TextColumn(
                "{task.description}",
                table_column=Column(no_wrap=True, overflow="ellipsis", max_width=self._console.width // 4),
            ),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=13)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        ]
        if self._console.width >= WIDE:
            columns.insert(1, BarColumn(bar_width=24))
        self._live = Progress(*columns, console=self._console) if sys.stderr.isatty() else None

    def __enter__(self) -> "Board":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, record: Record, total: int, title: str) -> None:
        """One more record of the run called `title`, which is to take `total` steps."""
        if self._live is None:
            self._print(record, total, title, self._left(record, total, title))
            return
        if title not in self._tasks:
            self._tasks[title] = self._live.add_task(title, total=total, state="")
        seen = self._seen.setdefault(title, {})
        seen |= {key: value for key, value in record.items() if key in ("loss", "val_loss", "seconds")}
        self._live.update(self._tasks[title], completed=record["step"], state=_state(seen))
        if record.get("event") in ("start", "save"):
            self._console.print(_event(record), style="dim", soft_wrap=True)

    def say(self, text: str, *, faint: bool = False) -> None:
        """Print a line between those of the runs; a faint one is to be copied, and stays whole."""
        text = text if faint else wrapped(text, self._console)
        self._console.print(text, style="dim" if faint else None, soft_wrap=True, markup=False)

    def forget(self, title: str) -> None:
        """Show the run called `title` no longer."""
        if self._live is not None and title in self._tasks:
            self._live.remove_task(self._tasks.pop(title))

    def _left(self, record: Record, total: int, title: str) -> str:
        """The time left at the pace since the run was first seen, evaluations included."""
        now, step = time.monotonic(), record["step"]
        first, begun = self._begun.setdefault(title, (step, now))
        if not first < step < total:
            return ""
        return f"  {timedelta(seconds=round((now - begun) / (step - first) * (total - step)))} left"

    def _print(self, record: Record, total: int, title: str, left: str) -> None:
        if "train_loss" in record and record.get("event") != "end":
            losses = (key for key in ("train_loss", "val_loss") if key in record)
            state = "  ".join(f"{key.replace('_', ' ')} {record[key]:.4f}" for key in losses)
            self._console.print(f"{title}  step {record['step']}/{total}  {state}{left}", soft_wrap=True)
        elif record.get("event") in ("start", "save"):
            self._console.print(f"{title}  {_event(record)}", soft_wrap=True)


def watch(records: Iterable[Record], total: int, title: str = "train") -> Iterator[Record]:
    """Pass the `records` of one run on, showing them."""
    with Board() as board:
        for record in records:
            board.show(record, total, title)
            yield record


def advancing(items: Iterable[T], total: int, title: str, size: Callable[[T], int]) -> Iterator[T]:
    """Pass `items` on, showing on a terminal how much of `total` their sizes make up, and the time left."""
    if not sys.stderr.isatty():
        yield from items
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(title, total=total)
        for item in items:
            yield item
            live.advance(task, size(item))


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show on a terminal that something is being done, and for how long."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=hidden) as live:
        live.add_task(title, total=None)
        yield


def _state(seen: Record) -> str:
    parts = []
    if "loss" in seen:
        parts.append(f"loss {seen['loss']:.3f}")
    if "val_loss" in seen:
        parts.append(f"val {seen['val_loss']:.3f}")
    if "seconds" in seen:
        parts.append(f"{1000 * seen['seconds']:.0f} ms/step")
    return "  ".join(parts)


def _event(record: Record) -> str:
    if record["event"] == "save":
        return f"saved step {record['step']} in {record['path']}"
    begin = f"from step {record['step']}, " if record["step"] else ""
    return (
        f"text: {record['text']}; "
        f"{begin}{record['parameters']:,} parameters, {record['vocab_size']} symbols, "
        f"{record['train_tokens']:,} tokens to train on, {record['val_tokens']:,} to validate, {record['device']}"
    )
