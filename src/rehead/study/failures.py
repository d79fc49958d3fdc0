"""Variants that fail: a study makes all that does not start from them, then raises the first error."""

import warnings

from rehead.errors import ConfigError, IntegrityError, InvalidInput, NumericError, OutOfMemory, ReheadError
from rehead.study.job import Job
from rehead.system.shortage import as_out_of_memory

FAILURES = (ConfigError, InvalidInput, IntegrityError, NumericError, OutOfMemory)
"""Errors of one variant, which do not stop the others: a full disk or a lost folder is no such error."""


class Failures:
    """The jobs of a study that failed, with what their errors said: the errors would hold models in memory."""

    def __init__(self) -> None:
        self._failed: list[tuple[Job, type[ReheadError], str]] = []

    def add(self, job: Job, raised: Exception) -> bool:
        """Note that a job failed, and warn of it: the others may take hours. False for an error that concerns all."""
        error = raised if isinstance(raised, FAILURES) else as_out_of_memory(raised)
        if error is None:
            return False
        self._failed.append((job, type(error), str(error)))
        warnings.warn(
            f"{_title(job)} failed; what does not start from it is still made: {error}", stacklevel=2
        )
        return True

    def stop(self, job: Job | None) -> bool:
        """Return True if the job failed, or one that it starts from."""
        return job is not None and (
            any(job == failed for failed, *_ in self._failed) or self.stop(job.parent)
        )

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with the name of its variant."""
        if not self._failed:
            return
        job, kind, error = self._failed[0]
        also = ", ".join(_title(other) for other, *_ in self._failed[1:])
        raise kind(
            f"{_title(job)}: {error} What does not start from it is made{f'; {also} failed, too' if also else ''}. "
            "Repeat the command to try again, or leave the variant out; with other options it needs another name."
        )


def _title(job: Job) -> str:
    return f"{job.variant}, seed {job.seed}"
