"""Progress as live lines on a terminal."""

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

from rehead.report.lines import is_of
from rehead.report.text import inert, wrapped
from rehead.stages import Stage

WIDE = 100
"""Characters of a terminal with room for a run's bar; steps and time left are always shown."""
Record = dict[str, Any]


def _text(field: str, **options: Any) -> TextColumn:
    """Return a column that shows a field of each task verbatim: `[red]` in a name does not colour it."""
    return TextColumn(f"{{task.{field}}}", markup=False, **options)


class LiveLines:
    """Draws a line for the `purpose`, if it is not empty, one for each stage, and one for each run.

    The lines of runs stay at the end: steps, time left, loss, validation loss, time per step.
    """

    def __init__(self, console: Console, purpose: str) -> None:
        self._console = console
        self._purpose = Progress(SpinnerColumn(), _text("description"), TimeElapsedColumn(), console=console)
        if purpose:
            self._purpose.add_task(inert(purpose), total=None)
        stages = _text("description"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
        self._stages = Progress(*stages, console=console)
        columns: list[ProgressColumn] = [
            _text(
                "description",
                table_column=Column(no_wrap=True, overflow="ellipsis", max_width=console.width // 4),
            ),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=13)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
            _text("fields[state]", table_column=Column(no_wrap=True, overflow="ellipsis")),
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
        """Start drawing."""
        self._live.start()

    def stop(self) -> None:
        """Stop drawing; the lines of the runs stay."""
        for task in self._purpose.task_ids:
            self._purpose.remove_task(task)
        self._live.transient = not self._runs.tasks
        self._live.stop()

    def stage(self, stage: Stage, title: str) -> None:
        """Update the progress of a stage under a title."""
        if stage.state == "begun":
            self._tasks[title] = self._stages.add_task(inert(title), total=stage.total)
        self._stages.update(self._tasks[title], completed=stage.done)
        if stage.state == "ended":
            self._live.refresh()
            self._stages.remove_task(self._tasks.pop(title))

    def run(self, record: Record, total: int, title: str, event: str) -> None:
        """Update a run of `total` steps with a record, and print its `event` if there is one."""
        if title not in self._tasks:
            self._tasks[title] = self._runs.add_task(inert(title), total=total, state="")
        seen = self._seen.setdefault(title, {})
        seen |= {key: value for key, value in record.items() if key in ("loss", "val_loss", "seconds")}
        self._runs.update(self._tasks[title], completed=record["step"], state=_state(seen))
        if event:
            self._console.print(inert(event), style="dim", soft_wrap=True)

    def say(self, text: str, *, faint: bool) -> None:
        """Print a line above the others."""
        text = inert(text) if faint else wrapped(inert(text), self._console)
        self._console.print(text, style="dim" if faint else None, soft_wrap=True)

    def forget(self, title: str) -> None:
        """Remove a run that has ended, with what is left of its stages."""
        for key in [key for key in self._tasks if is_of(key, title)]:
            task = self._tasks.pop(key)
            (self._runs if key == title else self._stages).remove_task(task)

    def _shown(self) -> Group:
        return Group(*(lines for lines in (self._runs, self._purpose, self._stages) if lines.tasks))


def _state(seen: Record) -> str:
    parts = []
    if "loss" in seen:
        parts.append(f"loss {seen['loss']:.3f}")
    if "val_loss" in seen:
        parts.append(f"val {seen['val_loss']:.3f}")
    if "seconds" in seen:
        parts.append(f"{1000 * seen['seconds']:.0f} ms/step")
    return "  ".join(parts)
