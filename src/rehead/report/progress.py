"""A run's records as one live line on a terminal, or as a line now and then elsewhere."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]


def watch(records: Iterable[Record], total: int, title: str = "train") -> Iterator[Record]:
    """Pass `records` on, showing them on stderr: loss, validation loss, time per step, time left."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    if not sys.stderr.isatty():
        yield from _lines(records, total, title, console)
        return
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total, state="")
        seen: Record = {}
        for record in records:
            seen |= {k: v for k, v in record.items() if k in ("loss", "val_loss", "seconds")}
            progress.update(task, completed=record["step"], state=_state(seen))
            if record.get("event") in ("start", "save"):
                console.print(_event(record), style="dim", soft_wrap=True)
            yield record


def _lines(records: Iterable[Record], total: int, title: str, console: Console) -> Iterator[Record]:
    for record in records:
        if "train_loss" in record and record.get("event") != "end":
            losses = (key for key in ("train_loss", "val_loss") if key in record)
            state = "  ".join(f"{key.replace('_', ' ')} {record[key]:.4f}" for key in losses)
            console.print(f"{title}  step {record['step']}/{total}  {state}", soft_wrap=True)
        elif record.get("event") in ("start", "save"):
            console.print(f"{title}  {_event(record)}", soft_wrap=True)
        yield record


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
        f"{begin}{record['parameters']:,} parameters, {record['vocab_size']} symbols, "
        f"{record['train_tokens']:,} tokens to train on, {record['val_tokens']:,} to validate, {record['device']}"
    )
