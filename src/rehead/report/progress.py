"""Progress on stderr: live lines on a terminal, elsewhere a line from time to time."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from rich.console import Console

from rehead.report.lines import PlainLines
from rehead.report.live import LiveLines
from rehead.stages import Stage, listening

Record = dict[str, Any]


class Board:
    """Shows the stages of everything that runs in its context, and the records of runs passed to it.

    `purpose` describes the work as a whole, in its own line.
    """

    def __init__(self, purpose: str = "") -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        watched = sys.stderr.isatty() and not console.is_dumb_terminal
        self._lines = LiveLines(console, purpose) if watched else PlainLines(console, purpose)
        self._open = ExitStack()

    def __enter__(self) -> "Board":
        self._lines.start()
        self._open.callback(self._lines.stop)
        self._open.enter_context(listening(self.stage))
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def show(self, record: Record, total: int, title: str) -> None:
        """Update the run called `title`, of `total` steps, with a record."""
        event = _event(record) if record.get("event") in ("start", "save") else ""
        self._lines.run(record, total, title, event)

    def stage(self, stage: Stage, of: str = "") -> None:
        """Update the progress of a stage, `of` one of several models."""
        self._lines.stage(stage, f"{of}  {stage.title}" if of else stage.title)

    def say(self, text: str, *, faint: bool = False) -> None:
        """Print a line between those of the runs; a faint one, meant to be copied, is not wrapped."""
        self._lines.say(text, faint=faint)

    def forget(self, title: str) -> None:
        """Remove the run called `title`, which has ended."""
        self._lines.forget(title)


def watch(records: Iterable[Record], total: int) -> Iterator[Record]:
    """Yield the `records` of one run and show its progress."""
    with Board() as board:
        for record in records:
            board.show(record, total, "train")
            yield record


def _event(record: Record) -> str:
    if record["event"] == "save":
        return f"saved step {record['step']} in {record['path']}"
    begin = f"from step {record['step']}, " if record["step"] else ""
    windows = f", each window begins with {record['bos']}" if "bos" in record else ""
    return (
        f"text: {record['text']}{windows}; "
        f"{begin}{record['parameters']:,} parameters, {record['vocab_size']:,} tokens of vocabulary, "
        f"{record['train_tokens']:,} tokens to train on, {record['val_tokens']:,} to validate, {record['device']}"
    )
