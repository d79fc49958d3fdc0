"""metrics.jsonl as a report needs it: whatever its length, and wherever its writer was stopped."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
MOST_POINTS = 1000
"""Of a curve; more cannot be told apart on a screen."""


@dataclass(kw_only=True)
class Metrics:
    """A run's losses by step, (step, train loss, validation loss), and its time per step in seconds.

    `torn` counts the lines that are no record: at most the last, which a killed run was writing.
    """

    losses: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    seconds_per_step: float | None = None
    torn: int = 0


def read_metrics(file: Path) -> Metrics:
    """What `file` holds; nothing where there is none."""
    found, seconds, by_step = Metrics(), [], {}
    for record in _records(file):
        if record is None:
            found.torn += 1
        elif "seconds" in record:
            seconds.append(record["seconds"])
        elif "train_loss" in record and "event" not in record:
            by_step[record["step"]] = (record["step"], record["train_loss"], record.get("val_loss"))
    found.losses = thin(list(by_step.values()))
    found.seconds_per_step = median(seconds) if seconds else None
    return found


def thin(points: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """At most `most` of them, evenly spread, the first and the last included."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]


def _records(file: Path) -> Iterator[dict[str, Any] | None]:
    if not file.is_file():
        return
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            yield record if isinstance(record, dict) else None
