"""Reads UTF-8 text from disk in parts, and writes files atomically."""

import codecs
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

from rehead.checkpoint.files.publish import MANIFEST
from rehead.checkpoint.find import has_options
from rehead.errors import InvalidInput, ReheadError, ResourceError
from rehead.system.aside import aside, sync

SAMPLE = re.compile(r"step-\d+\.txt")
"""Names of the texts that a run writes into its folder `samples`."""


def read(path: Path, size: int, option: str = "data.path") -> Iterator[str]:
    """Yield the text of a file, or of the files of a folder, in parts of at most `size` bytes.

    `option` is the option that gave the path, for error messages.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise InvalidInput(
            f"no text at {str(path)!r} ({why}): give {option} a file or folder that exists."
        ) from None
    if stat.S_ISDIR(mode):
        yield from _read_folder(path, size, option)
    elif stat.S_ISREG(mode):
        with resource(f"cannot read {str(path)!r}", "make it readable"):
            yield from _read_file(path, size)
    else:
        raise InvalidInput(f"{str(path)!r} is neither a file nor a folder: save its text to a file first.")


def _read_folder(path: Path, size: int, option: str) -> Iterator[str]:
    with resource(f"cannot list {str(path)!r}", f"name a file, or a folder of texts, with {option}"):
        files = [file for file in _files(path) if file.suffix in {".txt", ".md"} and not file.is_dir()]
    if not files:
        raise InvalidInput(f"no *.txt or *.md file in {str(path)!r}: name a file with {option}.")
    for i, file in enumerate(sorted(files, key=lambda file: file.relative_to(path).as_posix())):
        yield "\n\n" if i else ""
        yield from read(file, size, option)


def _files(path: Path) -> Iterator[Path]:
    """Yield all files below a folder, links followed, but for what rehead wrote itself: in models, and in runs.

    Raises OSError for a folder that cannot be listed.
    """

    def stop(error: OSError) -> None:
        raise error

    seen = set[tuple[int, int]]()
    for folder, folders, files in os.walk(path, onerror=stop, followlinks=True):
        found = os.stat(folder)
        if (found.st_dev, found.st_ino) in seen:
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        if {MANIFEST, "config.json"} <= {*files}:
            folders.clear()
            continue
        if os.path.basename(folder) == "samples" and has_options(Path(folder).parent):
            files = [name for name in files if not SAMPLE.fullmatch(name)]
        folders.sort(
            key=lambda name: (os.path.islink(os.path.join(folder, name)), name)
        )  # folders before links to them
        yield from (Path(folder) / name for name in files)


def _read_file(path: Path, size: int) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        more = True
        while more:
            start = file.tell() - len(decoder.getstate()[0])
            more = bool(data := file.read(size))
            try:
                yield decoder.decode(data, final=not more)
            except UnicodeDecodeError as error:
                where = f"{str(path)!r} is not UTF-8 at byte {start + error.start} ({error.reason})"
                utf16 = start == 0 and data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
                way = "with iconv -f UTF-16" if utf16 else "if it is Latin-1, with iconv -f LATIN1"
                raise InvalidInput(f"{where}: convert it first, {way} -t UTF-8.") from None


@contextmanager
def resource(what: str, remedy: str) -> Iterator[None]:
    """Turn a disk or network failure within the block into a ResourceError with a remedy."""
    try:
        yield
    except (OSError, HTTPException) as error:
        if isinstance(error, ReheadError):
            raise
        raise ResourceError(f"{what} ({error}): {remedy}.") from None


def write_whole(file: Path, blocks: Iterable[bytes]) -> None:
    """Write a file atomically and flush it to disk, and remove what killed processes left of it.

    After a power cut the name has the old content or the new. Raises InvalidInput if the name is a device or a pipe.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise InvalidInput(f"{file} exists and is not a regular file: choose another name.")
    file.parent.mkdir(parents=True, exist_ok=True)
    with aside(file.parent, file.name) as folder:
        with (folder / file.name).open("wb") as out:
            out.writelines(blocks)
            out.flush()
            os.fsync(out.fileno())
        os.replace(folder / file.name, file)
        with suppress(OSError):  # the file is there; some file systems cannot flush a folder
            sync(file.parent)
