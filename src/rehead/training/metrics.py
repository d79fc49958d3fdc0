"""Reads metrics.jsonl, the records of a run: one JSON object per line, each with its step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rehead.data.files import resource
from rehead.errors import InvalidInput

NUMBERS = ("loss", "train_loss", "val_loss", "seconds")


def records(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the records of `file`, if it exists; None for a last line that is incomplete.

    Raises InvalidInput for any other line that is not a JSON object with an integer `step`.
    """
    if not file.exists():
        return
    with resource(f"cannot read {file}", "make it readable"), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None and line.endswith(b"\n"):
                raise InvalidInput(
                    f"{file}: line {number} ({line.strip().decode(errors='replace')!r:.60}) is not a record of a "
                    "run: each is a JSON object with a whole number as its step. Correct the line, or delete it."
                )
            yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if all(isinstance(record.get(name, 0), int | float) for name in NUMBERS) else None
