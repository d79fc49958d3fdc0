"""metrics.jsonl as a report needs it: whatever its length, and wherever its writer was stopped."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from rehead.training.metrics import records

T = TypeVar("T")
MOST_POINTS = 1000
"""Of a curve; more cannot be told apart on a screen."""


@dataclass(kw_only=True)
class Metrics:
    """A run's losses by step, (step, train loss, validation loss), and its time per step in seconds.

    `torn` counts the lines that were cut while they were written: at most the last.
    """

    losses: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    seconds_per_step: float | None = None
    torn: int = 0


def read_metrics(file: Path) -> Metrics:
    """What `file` holds; nothing where there is none. Raises InvalidInput for a line that is no record."""
    found, seconds, by_step = Metrics(), [], {}
    for record in records(file):
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
