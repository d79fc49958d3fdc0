"""What a reporter does, what it begins with, and the registry of reporters."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rehead.registry import Registry

Kind = tuple[int, bool]
"""A record's step, and whether it is that of training or of a validation."""


class Reporter(Protocol):
    """Receives the metrics of one run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report metrics of a step: of training, with `loss`, or of a validation."""

    def close(self, exit_code: int) -> None:
        """Write what is pending and end the report; `exit_code` is 0 if the run finished, 1 if it was cut off."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a report begins with: the run's name and config, and a `folder` for what is kept of it in the run's folder.

    A resumed run continues after `step`, 0 for a new one; it repeats some records that it `logged` before.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    step: int
    logged: frozenset[Kind]

    def identity(self, file: str) -> tuple[str, frozenset[Kind]]:
        """Return an id that `file` keeps for resumed runs, and the records that were reported under it."""
        place = self.folder / file
        if place.is_file():
            return place.read_text(encoding="utf-8").strip(), self.logged
        self.folder.mkdir(parents=True, exist_ok=True)
        new = secrets.token_hex(4)
        place.write_text(f"{new}\n", encoding="utf-8")
        return new, frozenset()


def kind(step: int, metrics: Mapping[str, Any]) -> Kind:
    """Return what tells a record from the others of a run."""
    return step, "loss" in metrics


reporters: Registry[Callable[[Start], Reporter]] = Registry("reporter")
"""By the names of their packages, which are those of rehead's extras, too."""
