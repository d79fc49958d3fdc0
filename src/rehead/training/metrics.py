"""metrics.jsonl: what a run records, an object a line, each with its step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rehead.data.files import resource
from rehead.errors import InvalidInput

NUMBERS = ("loss", "train_loss", "val_loss", "seconds")


def records(file: Path) -> Iterator[dict[str, Any] | None]:
    """The records of `file`, nothing where there is none; None for a last line that was cut while it was written.

    Raises InvalidInput for any other line that is not an object with a whole number of steps.
    """
    if not file.exists():
        return
    with resource(f"cannot read {file}", "make it readable"), file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None and line.endswith(b"\n"):
                raise InvalidInput(
                    f"{file}: line {number} ({line.strip().decode(errors='replace')!r:.60}) is not a record of a "
                    "run: each is a JSON object with a whole number as its step. Correct that line, or delete it."
                )
            yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line, None where it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return None
    return record if all(isinstance(record.get(name, 0), int | float) for name in NUMBERS) else None
