"""Shares the calibration statistics of one model between its conversions."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rehead.checkpoint.files.publish import publish
from rehead.conversion.arguments import require_apart
from rehead.conversion.folder import FolderConverter
from rehead.study.job import Job
from rehead.system.aside import aside


class Sharing:
    """A context manager that converts jobs; successive jobs with the same source, texts and seed read the texts once.

    Shared data is in a hidden folder in `place`, which is removed at the end.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._folder = ExitStack()
        self._key: Any = None
        self._opened: FolderConverter | None = None

    def __enter__(self) -> "Sharing":
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def convert(self, job: Job) -> None:
        """Convert as `rehead convert` does with the job's options."""
        assert job.parent is not None
        require_apart(job.parent.model, job.model)
        opened = self._open(job, job.parent.model)
        with publish(job.model) as aside:
            opened.convert(aside, job.target, allow_loss=True, **job.fitting)

    def _open(self, job: Job, source: Path) -> FolderConverter:
        key = (source, job.reading, job.seed)
        if self._opened is None or key != self._key:
            self._close()
            self._place.mkdir(parents=True, exist_ok=True)
            scratch = self._folder.enter_context(aside(self._place, "statistics"))
            self._opened = FolderConverter(source, scratch, seed=job.seed, **job.reading)
            self._key = key
        return self._opened

    def _close(self) -> None:
        self._opened = None
        self._folder.close()
