"""How far long work is, as lines of a terminal that change."""

from typing import Any

from rich.console import Console, Group
from rich.live import Live
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
from rehead.stages import Stage

WIDE = 100
"""Characters of a terminal that has room for a run's bar; steps and time left stand in any."""
Record = dict[str, Any]


class LiveLines:
    """A line for the whole `work`, if it has a name, one for each stage, and one for each run.

    Those of the runs stay: steps, time left, loss, validation loss, time per step.
    """

    def __init__(self, console: Console, work: str) -> None:
        self._console = console
        self._work = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
        )
        if work:
            self._work.add_task(work, total=None)
        stages = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        self._stages = Progress(*stages, console=console)
        columns: list[ProgressColumn] = [
            TextColumn(
                "{task.description}",
                table_column=Column(no_wrap=True, overflow="ellipsis", max_width=console.width // 4),
            ),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=13)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            TextColumn("{task.fields[state]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        ]
        if console.width >= WIDE:
            columns.insert(1, BarColumn(bar_width=24))
        self._runs = Progress(*columns, console=console)
        self._live = Live(
            get_renderable=self._shown, console=console, refresh_per_second=10, redirect_stdout=False
        )
        self._tasks: dict[str, TaskID] = {}
        self._seen: dict[str, Record] = {}

    def start(self) -> None:
        """Begin to draw."""
        self._live.start()

    def stop(self) -> None:
        """Leave the lines of the runs behind."""
        for task in self._work.task_ids:
            self._work.remove_task(task)
        self._live.transient = not self._runs.tasks
        self._live.stop()

    def stage(self, stage: Stage, title: str) -> None:
        """What a stage is at, under a title."""
        if stage.state == "begun":
            self._tasks[title] = self._stages.add_task(title, total=stage.total)
        self._stages.update(self._tasks[title], completed=stage.done)
        if stage.state == "ended":
            self._live.refresh()
            self._stages.remove_task(self._tasks.pop(title))

    def run(self, record: Record, total: int, title: str, event: str) -> None:
        """One more record of a run, which is to take `total` steps, and what it says of an `event`."""
        if title not in self._tasks:
            self._tasks[title] = self._runs.add_task(title, total=total, state="")
        seen = self._seen.setdefault(title, {})
        seen |= {key: value for key, value in record.items() if key in ("loss", "val_loss", "seconds")}
        self._runs.update(self._tasks[title], completed=record["step"], state=_state(seen))
        if event:
            self._console.print(event, style="dim", soft_wrap=True)

    def say(self, text: str, *, faint: bool) -> None:
        """Print a line above the others."""
        text = text if faint else wrapped(text, self._console)
        self._console.print(text, style="dim" if faint else None, soft_wrap=True, markup=False)

    def forget(self, title: str) -> None:
        """Show a run no longer."""
        if title in self._tasks:
            self._runs.remove_task(self._tasks.pop(title))

    def _shown(self) -> Group:
        return Group(*(one for one in (self._runs, self._work, self._stages) if one.tasks))


def _state(seen: Record) -> str:
    parts = []
    if "loss" in seen:
        parts.append(f"loss {seen['loss']:.3f}")
    if "val_loss" in seen:
        parts.append(f"val {seen['val_loss']:.3f}")
    if "seconds" in seen:
        parts.append(f"{1000 * seen['seconds']:.0f} ms/step")
    return "  ".join(parts)
