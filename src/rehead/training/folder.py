"""A run on disk: config.yaml, metrics.jsonl, samples/, checkpoints/step-NNNNNN/, and a lock."""

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rehead.checkpoint import newest_step, publish
from rehead.checkpoint.files.publish import ASIDE, sweep
from rehead.checkpoint.find import steps
from rehead.data import TOKENS
from rehead.data.files import resource, write_whole
from rehead.errors import IntegrityError, InvalidInput
from rehead.registry import nearest
from rehead.training.hold import hold
from rehead.training.metrics import records

REMEDY = "free some space or make it writable, then continue with trainer.resume=True, or use another system.work_dir"


class RunFolder:
    """Paths of one run, and the few things done to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tokens = path / TOKENS
        self.read_tokens = path / f"{TOKENS}.read"
        """Those of a start that may still be refused."""

    @property
    def begun(self) -> bool:
        """Whether there is a run, with or without a checkpoint."""
        return self.config.exists() or bool(steps(self.path))

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[Path | None]:
        """Hold the folder for this process; give the checkpoint to resume, if there is one.

        Raises InvalidInput where a run is there and `resume` is not asked for or the other way round, Busy
        where another process holds it. A block that fails before `begin` leaves nothing behind.
        """
        if resume and not self.begun:
            raise InvalidInput(self._nothing_to_resume())
        with hold(self.path, lambda: self.begun):
            made = not self.checkpoints.exists()
            with resource(f"cannot write in {self.path}", "choose another system.work_dir"):
                self.checkpoints.mkdir(exist_ok=True)
            try:
                sweep(self.checkpoints)
                newest = newest_step(self.path)
                if newest is not None and not resume:
                    raise InvalidInput(
                        f"{self.path} already holds a run (up to {newest.name}): continue it with "
                        "trainer.resume=True, or choose another system.work_dir."
                    )
                if newest is None and steps(self.path):
                    raise IntegrityError(
                        f"{self.path} has checkpoints, and none of them is whole: there is nothing to resume from. "
                        "Choose another system.work_dir, or remove them to train anew."
                    )
                yield newest
            finally:
                self.read_tokens.unlink(missing_ok=True)
                if made and not self.begun:
                    with suppress(OSError):
                        self.checkpoints.rmdir()

    def recorded(self, step: int) -> list[dict[str, Any]]:
        """What metrics.jsonl says up to `step`; a last line that was cut is left out, with a warning."""
        found = list(records(self.metrics)) if step else []
        if None in found:
            warnings.warn(
                f"the last line of {self.metrics} was cut while it was written, and is left out", stacklevel=2
            )
        return [record for record in found if record is not None and record["step"] <= step]

    def begin(self, config: str, before: Iterable[dict[str, Any]]) -> None:
        """Write the resolved config, and of the metrics only `before`: what came after will be made again."""
        with resource(f"cannot write in {self.path}", REMEDY):
            os.replace(self.read_tokens, self.tokens)
            write_whole(self.metrics, [f"{json.dumps(record)}\n".encode() for record in before])
            write_whole(self.config, [config.encode()])

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, in one write."""
        with resource(f"cannot write {self.metrics}", REMEDY), self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """Publish `write`'s files as the checkpoint of `step`; then drop all before it but `keep` - 1.

        What lies after it is damaged, or the run would have gone on from there.
        """
        folder = self.checkpoints / f"step-{step:06d}"
        with publish(folder, overwrite=True) as aside:
            write(aside)
        for _, old in [(number, old) for number, old in steps(self.path) if number <= step][:-keep]:
            gone = old.rename(old.with_name(f"{ASIDE}{old.name}"))  # at once, for who is reading it
            shutil.rmtree(gone, ignore_errors=True)
        return folder

    def write_sample(self, step: int, text: str) -> None:
        """Keep a sample as samples/step-NNNNNN.txt."""
        file = self.path / "samples" / f"step-{step:06d}.txt"
        with resource(f"cannot write {file}", REMEDY):
            write_whole(file, [text.encode()])

    def _nothing_to_resume(self) -> str:
        """That there is no run, and which ones are beside it."""
        beside = sorted(place.name for place in self.path.parent.glob("*") if RunFolder(place).begun)
        there = nearest(self.path.name, beside) if beside else f" There is none in {self.path.parent} at all."
        return (
            f"{self.path} holds no run to resume.{there} Check system.work_dir, or leave trainer.resume out to "
            "begin a run there."
        )
