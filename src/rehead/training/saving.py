"""The contents of a checkpoint, and its publication: at once, or by a thread while training continues."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from rehead.checkpoint import own
from rehead.checkpoint.files.deferred import materialise
from rehead.model import LanguageModel, skeleton
from rehead.training import state
from rehead.training.folder import RunFolder
from rehead.training.ranks import OneProcess


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A model, None in all processes but the first; the rest of the run's state; and texts by file name.

    Sharded tensors are deferred: the first process gathers them as it writes or copies.
    """

    model: LanguageModel | None
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    texts: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the files of a checkpoint."""
        assert self.model is not None
        own.write(self.model, folder, self.texts)
        state.write(folder, self.tensors, self.numbers)

    def copied(self) -> "Snapshot":
        """Return one on the CPU that training does not change; the same where there is no model."""
        if self.model is None:
            return self
        tensors, weights = _copies(self.tensors), _copies(dict(self.model.named_parameters()))
        model = skeleton(self.model.config)
        own.assign(model, weights, "the model", in_memory=False)
        return replace(self, model=model, tensors=tensors)


@dataclass
class Saver:
    """Publishes snapshots of what `ranks` train as checkpoints in `folder`, of which it keeps the newest `keep`.

    Only one is being published at a time. At the end of the block nothing is.
    """

    folder: RunFolder
    keep: int
    ranks: OneProcess
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "rehead-save"))
    _begun: Future[dict[str, Any]] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def save(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """Publish a snapshot; yield the record of one that was begun before it, and its own."""
        yield from self.finish()
        record = self.ranks.reading(lambda: self._publish(snapshot))
        self.folder.meet()
        yield record

    def begin(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """Copy a snapshot and begin to publish it; yield the record of one that was begun before it."""
        yield from self.finish()
        self._begun = self._pool.submit(self._publish, self.ranks.reading(snapshot.copied))

    def finished(self) -> Iterator[dict[str, Any]]:
        """Yield the record of a snapshot that has been published. Raises what went wrong."""
        if self._begun is not None and self._begun.done():
            yield from self.finish()

    def finish(self) -> Iterator[dict[str, Any]]:
        """Wait for what was begun, and yield its record. Raises what went wrong."""
        begun, self._begun = self._begun, None
        if begun is not None:
            yield begun.result()

    def _publish(self, snapshot: Snapshot) -> dict[str, Any]:
        step = snapshot.numbers["step"]
        path = self.folder.save(step, snapshot.write, self.keep)
        return {"event": "save", "step": step, "path": str(path)}


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the CPU's memory; what is deferred is gathered for them, one tensor at a time."""
    return {name: materialise(one).detach().to("cpu", copy=True) for name, one in tensors.items()}
