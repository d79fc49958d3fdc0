"""The reports of a run: a reporter that fails is dropped with a warning, and training continues."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from typing import Any

from rehead.errors import ConfigError
from rehead.training.reporting.base import Kind, Reporter, Start, kind, reporters

log = logging.getLogger("rehead")


def require_packages(names: Sequence[str]) -> None:
    """Raise ConfigError for a reporter whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(f'trainer.report_to={name} needs {name}: pip install "rehead[{name}]".')


class Reports:
    """Gives a run's records to the reporters of `names`, which are closed at the end of the block.

    `again` are records of the step that a resumed run continues from.
    """

    def __init__(self, names: Sequence[str], start: Start, again: Sequence[Mapping[str, Any]] = ()) -> None:
        self._open: dict[str, Reporter] = {}
        self._said: set[Kind] = set()
        """What was reported of the newest step: a run that had ended is validated again when it is resumed."""
        for name in names:
            self._try(name, partial(self._begin, name, start))
        for record in again:
            self.log(record)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, type_: object, *error: object) -> None:
        for name, reporter in list(self._open.items()):
            self._try(name, partial(reporter.close, int(type_ is not None)))

    def log(self, record: Mapping[str, Any]) -> None:
        """Report the numbers of a record of metrics.jsonl, unless it is an event."""
        if not self._open or "event" in record or (what := kind(record["step"], record)) in self._said:
            return
        self._said = {one for one in self._said if one[0] == what[0]} | {what}
        metrics = {
            name: float(value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name, reporter in list(self._open.items()):
            self._try(name, partial(reporter.log, record["step"], metrics))

    def _begin(self, name: str, start: Start) -> None:
        self._open[name] = reporters[name](start)

    def _try(self, name: str, do: Callable[[], None]) -> None:
        """Do something with a reporter, silently; drop it if that fails."""
        try:
            with redirect_stdout(StringIO()):
                do()
        except Exception as error:  # a full disk, a server that is gone, no account
            self._open.pop(name, None)
            words = " ".join(str(error).split()) or type(error).__name__
            log.warning("%s failed (%.150s): training continues without it.", name, words)
