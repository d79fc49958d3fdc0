"""Variants that fail: a study makes all that does not start from them, then raises the first error."""

import warnings

from rehead.errors import ConfigError, NumericError, ReheadError, ResourceError
from rehead.study.job import Job

FAILURES = (ConfigError, NumericError, ResourceError)
"""Errors of one variant, which do not stop the others."""


class Failures:
    """The jobs of a study that failed, with their errors."""

    def __init__(self) -> None:
        self._failed: list[tuple[Job, ReheadError]] = []

    def add(self, job: Job, error: ReheadError) -> None:
        """Note that a job failed, and warn of it: the others may take hours."""
        self._failed.append((job, error))
        warnings.warn(
            f"{_title(job)} failed; what does not start from it is still made: {error}", stacklevel=2
        )

    def stop(self, job: Job | None) -> bool:
        """Return True if the job failed, or one that it starts from."""
        return job is not None and (any(job == failed for failed, _ in self._failed) or self.stop(job.parent))

    def raise_first(self) -> None:
        """Raise the first error, if there is one, with the name of its variant."""
        if not self._failed:
            return
        job, error = self._failed[0]
        also = ", ".join(_title(other) for other, _ in self._failed[1:])
        raise type(error)(
            f"{_title(job)}: {error} What does not start from it is made{f'; {also} failed, too' if also else ''}. "
            "Repeat the command to try again, or leave the variant out; with other options it needs another name."
        ) from error


def _title(job: Job) -> str:
    return f"{job.variant}, seed {job.seed}"
