"""The folder of a run: config.yaml, metrics.jsonl, samples/, checkpoints/step-NNNNNN/, and a lock."""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rehead.checkpoint import newest_step, publish
from rehead.checkpoint.files.publish import MANIFEST, recover
from rehead.checkpoint.find import has_options, steps
from rehead.data import TOKENS
from rehead.data.files import resource, write_whole
from rehead.data.hold import Held, hold
from rehead.errors import IntegrityError, InvalidInput, ResourceError
from rehead.registry import nearest
from rehead.system.aside import discard
from rehead.training.metrics import records

log = logging.getLogger("rehead")
REMEDY = "free some space or make it writable, then continue with trainer.resume=True, or use another system.work_dir"


class RunFolder:
    """The files of one run, and the operations on them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.tokens = path / TOKENS
        self.read_tokens = path / f"{TOKENS}.read"
        """Tokens of a run that has not begun yet and may still be refused."""
        self._held: Held | None = None

    @property
    def begun(self) -> bool:
        """Return True if there is a run, with or without a checkpoint."""
        return has_options(self.path) or bool(steps(self.path))

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[Path | None]:
        """Lock the folder for this process; yield the checkpoint to resume, or None.

        Raises InvalidInput if there is a run and `resume` is False, or no run and `resume` is True, and Busy
        if another process holds the lock. A block that fails before `begin` leaves nothing behind.
        """
        if resume and not self.begun:
            raise InvalidInput(self._nothing_to_resume())
        for name in ("samples", "reports"):
            if (self.path / name).is_symlink():
                raise InvalidInput(f"{self.path / name} is a link, and would be written through. Remove it.")
        with hold(self.path, lambda: self.begun, "system.work_dir") as self._held:
            is_new = not self.checkpoints.exists()
            try:
                if not self.begun:
                    self._require_free(is_new=is_new)
                with resource(f"cannot write in {self.path}", "choose another system.work_dir"):
                    self.checkpoints.mkdir(exist_ok=True)
                recover(self.checkpoints, sole=True)
                newest = newest_step(self.path)
                if newest is not None and not resume:
                    raise InvalidInput(
                        f"{self.path} already holds a run (up to {newest.name}): continue it with "
                        "trainer.resume=True, or choose another system.work_dir."
                    )
                if newest is None and steps(self.path):
                    raise IntegrityError(
                        f"every checkpoint in {self.path} is damaged: there is nothing to resume from. "
                        "Choose another system.work_dir, or remove the checkpoints to train from the start."
                    )
                if newest is None and resume:
                    log.info("%s has no checkpoint yet: starting at step 0", self.path)
                yield newest
            finally:
                with suppress(OSError):  # the folder may have gone away
                    self.read_tokens.unlink(missing_ok=True)
                    if is_new and not self.begun:
                        self.checkpoints.rmdir()

    def _require_free(self, *, is_new: bool) -> None:
        """Refuse files that no run wrote; beside checkpoints/, metrics and tokens are of a run killed as it began."""
        for file in (self.config, self.metrics, self.tokens) if is_new else (self.config,):
            if file.exists():
                raise InvalidInput(
                    f"{file} is not from a run, and training would overwrite it. Choose another system.work_dir."
                )
        if (self.path / "config.json").exists():
            raise InvalidInput(
                f"{self.path} is a model's folder: commands would read that model and not the run. Choose another "
                "system.work_dir."
            )

    def recorded(self, step: int | None = None) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, up to `step`. A truncated last line is left out, with a warning."""
        lines = list(records(self.metrics)) if step != 0 else []
        if None in lines:
            warnings.warn(f"the last line of {self.metrics} is incomplete and is ignored", stacklevel=2)
        return [record for record in lines if record is not None and (step is None or record["step"] <= step)]

    def begin(self, config: str, before: Iterable[dict[str, Any]]) -> None:
        """Write the resolved config, and cut the metrics to `before`: later steps will be repeated."""
        with resource(f"cannot write in {self.path}", REMEDY):
            try:
                os.replace(self.read_tokens, self.tokens)
                write_whole(self.metrics, [f"{json.dumps(record)}\n".encode() for record in before])
                write_whole(self.config, [config.encode()])
            except BaseException:  # an interrupt, too: a folder holds a run or nothing
                if not self.begun:
                    self.tokens.unlink(missing_ok=True)
                    self.metrics.unlink(missing_ok=True)
                raise

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl, in one write."""
        with self._writing(f"cannot write {self.metrics}"), self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """Publish the files of `write` as the checkpoint of `step`; keep `keep` - 1 older ones.

        Checkpoints of later steps are damaged, or the run would have resumed from them; they are left alone.
        """
        folder = self.checkpoints / f"step-{step:06d}"
        self._require_held()
        if folder.is_dir() and not folder.is_symlink() and not (folder / MANIFEST).is_file():
            discard(folder)  # damaged: `publish` replaces only what has a manifest
        try:
            with publish(folder, overwrite=True) as aside:
                self._require_held()  # the folders above may be new: of a run that has just been moved
                write(aside)
        except ResourceError as error:
            self._require_held()
            raise ResourceError(f"{error} Continue with trainer.resume=True then.") from error
        for _, old in [(number, old) for number, old in steps(self.path) if number <= step][:-keep]:
            discard(old)
        return folder

    def way_back(self) -> str:
        """Return how to resume a run that has diverged."""
        good = newest_step(self.path)
        if good is None:
            return "There is no checkpoint to resume from yet: start again."
        where = f"system.work_dir={self.path} trainer.resume=True"
        return f"{where} resumes from step {int(good.name[5:])}."

    def meet(self) -> None:
        """Wait until the process that writes has come here, too."""

    def write_sample(self, step: int, text: str) -> None:
        """Write a sample to samples/step-NNNNNN.txt."""
        file = self.path / "samples" / f"step-{step:06d}.txt"
        with self._writing(f"cannot write {file}"):
            write_whole(file, [text.encode()])

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Turn a disk failure into a ResourceError that says how to continue."""
        self._require_held()
        try:
            with resource(what, REMEDY):
                yield
        except ResourceError:
            self._require_held()  # it may have gone in between
            raise

    def _require_held(self) -> None:
        if self._held is not None and not self._held.is_valid:
            raise ResourceError(
                f"{self.path} was deleted, moved or replaced while this run trained. If it was moved, move it back and "
                "continue with trainer.resume=True; otherwise start again."
            )

    def _nothing_to_resume(self) -> str:
        """Return the message that there is no run, with the nearest run beside it."""
        beside = sorted(place.name for place in self.path.parent.glob("*") if RunFolder(place).begun)
        hint = nearest(self.path.name, beside) if beside else f" There are no runs in {self.path.parent}."
        return (
            f"{self.path} holds no run to resume.{hint} Check system.work_dir, or leave trainer.resume out to "
            "begin a run there."
        )
