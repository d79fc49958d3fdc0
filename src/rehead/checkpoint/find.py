"""Resolves a path to a model folder, the newest good checkpoint of a run folder, or a model of the Hub."""

import os
import re
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from rehead.checkpoint import hub
from rehead.checkpoint.files.opened import changed
from rehead.checkpoint.files.publish import READ, standing, verify
from rehead.checkpoint.files.strict import require_regular
from rehead.config import DataOptions, RunOptions
from rehead.errors import IntegrityError, InvalidInput, ResourceError

T = TypeVar("T")
PICKLE = "model.pt"
GROUPS = ("system", "data", "model", "trainer")
"""Sections of a run's config.yaml."""
CONFIG = 1 << 20
"""Characters of a config.yaml, at most."""
READINGS = 5
"""Attempts to read a folder that is there and changes: so many at least, and all that begin within `PATIENCE`."""
PATIENCE = 2.0
"""Seconds in which a small folder may change many times, and be read between two changes."""
LISTINGS = 5
"""Attempts to list a run's checkpoints, since a listing may miss folders that are renamed at the same time."""
SETTLED = 2_000_000_000
"""Nanoseconds after which a change of a file changes its time stamp, too."""
_verified: dict[Path, list[tuple[str, int, int, int]]] = {}
"""Checkpoints that matched their manifest, with the time stamps of their files then."""
STEP = re.compile(r"step-([0-9]+)")


def path_of(path: str | Path) -> Path:
    """Return a caller's argument as a Path. Raises InvalidInput unless it is a str or a path."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidInput(
            f"path is {path!r:.40} ({type(path).__name__}): expected a text or a pathlib.Path."
        )
    return Path(path)


def resolve(path: Path) -> Path:
    """Return the model folder that `path` refers to. Raises InvalidInput if there is none."""
    try:
        return _resolve(path)
    except ResourceError:
        raise
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}. Give a model folder or a run folder.") from error


def read_at(path: Path, read: Callable[[Path], T]) -> T:
    """Return `read(folder)` for the model folder that `path` refers to.

    If a run in training deletes that checkpoint in the meantime, the next one is read; if the folder is replaced, it is
    read again, since its files may have been those of two models. Raises IntegrityError if it changes every time.
    """
    attempts, begun = 0, time.monotonic()
    while attempts < READINGS or time.monotonic() < begun + PATIENCE:
        folder = resolve(path)
        before = _identity(folder)
        try:
            result = read(folder)
        except (InvalidInput, IntegrityError):
            if before is not None and before.is_that_of(folder):
                raise
        else:
            if before is None or before.is_that_of(folder) in (True, None):
                return result
        attempts += folder.exists()
    raise changed(path)


def read_without_weights(path: Path, read: Callable[[Path], T]) -> T:
    """Return `read` of a config.json or of a folder with one. Of a model of the Hub, that file alone is fetched."""
    file = path if path.is_file() else None if os.path.exists(path) else hub.config_file(path)
    return read_at(path, read) if file is None else read(file)


class _Identity(NamedTuple):
    """What tells the model in a folder from another that takes its place."""

    place: tuple[int, int]
    changed: int
    files: list[tuple[str, int, int, int]]

    def is_that_of(self, folder: Path) -> bool | None:
        """Whether the folder has the same model still: the same files, or changed ones in place. None if it is gone.

        A file that is written anew may get the number of one that was removed, but another time.
        """
        now = _identity(folder)
        if now is None:
            return None
        return self.place == now.place and (self.changed == now.changed or self.files == now.files)


def _identity(folder: Path) -> _Identity | None:
    try:
        found = folder.stat()
    except OSError:
        return None
    files = [one for one in _stamp(folder) if one[0].endswith((*READ, hub.TEMPLATES[1:]))]
    return _Identity((found.st_dev, found.st_ino), found.st_mtime_ns, files)


def _resolve(path: Path) -> Path:
    path = standing(path)
    _refuse_pickled(path)
    if (path / "config.json").is_file():
        return path
    if (path / "checkpoints").is_dir():
        step = newest_step(path)
        if step is None:
            raise InvalidInput(f"{path} is a run without a good checkpoint yet: train it further.")
        return step
    if not path.exists():
        fetched = hub.snapshot(path)
        if fetched is None:
            raise InvalidInput(
                f"{path} does not exist: expected a model folder or a run folder, or org/name@<commit> of the Hub."
            )
        return fetched
    if not path.is_dir():
        kind = "a file" if path.is_file() else "neither a file nor a folder"
        raise InvalidInput(f"{path} is {kind}: expected a model folder or a run folder.")
    held = sorted(entry.name for entry in path.iterdir())[:8]
    raise InvalidInput(
        f"{path} is neither a model folder (config.json, model.safetensors) nor a run folder (checkpoints/): it holds "
        f"{', '.join(held) or 'nothing'}."
    )


def _refuse_pickled(path: Path) -> None:
    """Refuse a work folder of minGPT's chargpt: its config.json has another format, its weights are a pickle."""
    pickle = path if path.name == PICKLE else path / PICKLE
    if pickle.is_file() and not any(pickle.parent.glob("*.safetensors")):
        raise InvalidInput(
            f"{pickle.parent} is a work folder of minGPT, the homework's starter: {PICKLE} is a pickle, which can run "
            "code when it is read, so rehead does not read it. Train the model again: rehead train takes the flags of "
            "args.txt."
        )


def is_run(path: Path) -> bool:
    """Whether this is a run folder, whose config.yaml names a text. In a model folder that file may be anything."""
    return not (path / "config.json").is_file() and has_options(path)


def has_options(run: Path) -> bool:
    """Whether config.yaml has the sections of a run's: other programs have files of that name, too."""
    if not (run / "config.yaml").is_file():  # also not a pipe, which would block
        return False
    with suppress(OSError), (run / "config.yaml").open(encoding="utf-8-sig", errors="replace") as file:
        return set(GROUPS) <= set(re.findall(r"^(\w+):", file.read(CONFIG), re.MULTILINE))
    return False


def run_of(path: Path) -> Path | None:
    """Return the run folder that this is, or whose checkpoint it is; None if there is no run."""
    place = path.absolute()
    run = place.parents[1] if place.parent.name == "checkpoints" else path
    return run if is_run(run) else None


def run_data(path: Path) -> DataOptions | None:
    """Return the data options among `run_options`."""
    options = run_options(path)
    return None if options is None else options.data


def run_options(path: Path) -> RunOptions | None:
    """Return the options of the run at `path`, or of the run whose checkpoint it is; None if there is no run.

    They are read from config.yaml, which no manifest covers: do not trust a file that it names.
    """
    from rehead.config import flags  # needs PyYAML, which rehead.load does without

    run = run_of(path)
    if run is None:
        return None
    require_regular(run / "config.yaml")
    return flags.read([], (run / "config.yaml",))


def _verify_once(folder: Path) -> None:
    """Verify a folder whose files are not those that were verified before. Loading hashes what it reads anyway."""
    stamp = _stamp(folder)
    if stamp and _verified.get(folder) == stamp:
        return
    verify(folder)
    if stamp and time.time_ns() - max(changed for *_, changed in stamp) > SETTLED:
        _verified[folder] = stamp


def _stamp(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return what tells files from changed ones; nothing for a folder that was just deleted."""
    try:
        found = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    except OSError:
        return []
    return [(name, one.st_ino, one.st_size, one.st_mtime_ns) for name, one in found]


def steps(run: Path) -> list[tuple[int, Path]]:
    """Return all published checkpoints of a run, oldest first, checked or not."""
    folders = (run / "checkpoints").glob("step-*")
    numbered = [(int(match[1]), folder) for folder in folders if (match := STEP.fullmatch(folder.name))]
    return sorted(numbered)


def newest_step(run: Path) -> Path | None:
    """Return the newest checkpoint of a run that matches its manifest; warn about damaged ones."""
    listings = (steps(run) for _ in range(LISTINGS))
    for _, folder in reversed(next(filter(None, listings), [])):
        try:
            _verify_once(folder)
        except (IntegrityError, InvalidInput) as error:
            if not folder.exists():  # the run deleted it for newer ones after it was listed
                return newest_step(run)
            if isinstance(error, InvalidInput):
                raise
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
            continue
        return folder
    return None
