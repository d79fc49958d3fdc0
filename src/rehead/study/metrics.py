"""Reads metrics.jsonl for a report, at any length and with an incomplete last line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from rehead.training.metrics import records

T = TypeVar("T")
MOST_POINTS = 1000
"""Points of a curve; a screen cannot show more."""


@dataclass(kw_only=True)
class Metrics:
    """A run's losses, (step, train loss, validation loss), and its median seconds per step.

    `torn` is the number of incomplete lines: at most the last one.
    """

    losses: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    seconds_per_step: float | None = None
    torn: int = 0


def read_metrics(file: Path) -> Metrics:
    """Read `file`, if it exists. Raises InvalidInput for a line that is not a record."""
    metrics, seconds, by_step = Metrics(), [], {}
    for record in records(file):
        if record is None:
            metrics.torn += 1
        elif "seconds" in record:
            seconds.append(record["seconds"])
        elif "train_loss" in record and "event" not in record:
            by_step[record["step"]] = (record["step"], record["train_loss"], record.get("val_loss"))
    metrics.losses = downsample(list(by_step.values()))
    metrics.seconds_per_step = median(seconds) if seconds else None
    return metrics


def downsample(points: Sequence[T], most: int = MOST_POINTS) -> list[T]:
    """Return at most `most` points, evenly spread, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(index * (len(points) - 1) / (most - 1))] for index in range(most)]
