"""The folder of a run that several processes train: the first writes it, the others wait for it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rehead.training.folder import RunFolder


class SharedFolder(RunFolder):
    """The folder of a run, which the first process writes."""

    def __init__(self, path: Path, tell: Callable[[str | None], str], *, first: bool, again: bool) -> None:
        """Open the folder at `path`; `tell` gives all processes the text of the `first`.

        What torchrun has started `again` after a loss resumes without being asked.
        """
        super().__init__(path)
        self._tell, self._first, self._again = tell, first, again

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[Path | None]:
        """Yield the checkpoint that the first process found; it holds the lock."""
        if self._first:
            with super().open(resume=resume or (self._again and self.begun)) as checkpoint:
                self._tell("" if checkpoint is None else str(checkpoint))
                yield checkpoint
        else:
            found = self._tell(None)
            yield Path(found) if found else None

    def begin(self, config: str, before: Iterable[dict[str, Any]]) -> None:
        """Begin the run; the others wait."""
        if self._first:
            super().begin(config, before)
        dist.barrier()

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        if self._first:
            super().log(record)

    def save(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """Publish a checkpoint, in the first process."""
        if self._first:
            return super().save(step, write, keep)
        return self.checkpoints / f"step-{step:06d}"

    def meet(self) -> None:
        """Wait until the first process has come here, too."""
        dist.barrier()

    def write_sample(self, step: int, text: str) -> None:
        """Write a sample."""
        if self._first:
            super().write_sample(step, text)
