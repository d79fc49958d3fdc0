"""Publishes folders atomically, with a manifest that shows later damage.

All files are written next to the final path, flushed to disk and hashed; one rename publishes the folder.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rehead.checkpoint.files.exchange import exchange
from rehead.checkpoint.files.shards import LONG
from rehead.checkpoint.files.strict import require_regular, strict_json
from rehead.errors import IntegrityError, InvalidInput, ReheadError, ResourceError
from rehead.stages import staged
from rehead.system.aside import ASIDE, allowed, aside, locked, sweep, sync

MANIFEST = "MANIFEST.json"
FORMAT = 1
READ = (".json", ".safetensors")
"""Suffixes of files that rehead reads; such a file is refused if the manifest does not list it."""
FREE = ("README.md",)
"""Files that anybody may add or edit: no manifest lists them."""
BEFORE = ".before-rehead-"
"""Prefix of a folder's name while it is replaced, on file systems that cannot exchange two folders."""
LARGEST = 4 * 2**20
"""Maximum size of a manifest in bytes."""
AGAIN = "Copy the folder again from an intact copy, or create it again."
OS_ERROR = re.compile(r"os error (\d+)")
"""The form in which safetensors reports a system error, such as a full disk."""


@contextmanager
def publish(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to write into; at the end of the block it is renamed to `folder`.

    A failure inside leaves no files, and a published `folder` unchanged; an empty one is removed at the start. The
    next call in the same parent folder removes what a killed process left. Raises InvalidInput if `folder` is not
    empty (with `overwrite`, unless it is published), ResourceError if the disk is full or read-only.
    """
    with _parents_of(folder):
        try:
            recover(folder.parent, folder.name)
            _refuse_existing(folder, overwrite)
            place = ExitStack()
            written = place.enter_context(aside(folder.parent, folder.name))
        except OSError as error:
            raise _resource(folder, error) from error
        with place:
            try:
                yield written
                mode = allowed()
                _write_manifest(written, mode & 0o666)
                written.chmod(mode)
                _refuse_existing(folder, overwrite)  # another writer may have published it in the meantime
                if folder.exists():
                    _swap(written, folder)
                else:
                    written.rename(folder)
            except (OSError, SafetensorError) as error:
                raise error if isinstance(error, ResourceError) else _resource(folder, error) from error
            try:
                sync(folder.parent)
            except OSError as error:
                raise ResourceError(
                    f"{folder} is written, but may be lost if the power fails now: {error.strerror}. Check the disk, "
                    "and write it again."
                ) from error


@contextmanager
def publish_file(file: Path) -> Iterator[Path]:
    """Yield a place to write a file at; at the end of the block it is renamed to `file`, as `publish` does folders.

    Raises InvalidInput if `file` exists, ResourceError if the disk is full or read-only.
    """
    with _parents_of(file):
        try:
            _refuse_file(file)
            with aside(file.parent, file.name) as folder:
                yield folder / file.name
                (folder / file.name).chmod(allowed() & 0o666)
                sync(folder / file.name)
                _refuse_file(file)
                (folder / file.name).rename(file)
                sync(file.parent)
        except OSError as error:
            raise error if isinstance(error, ResourceError) else _resource(file, error) from error


def settle(written: Path, place: Path) -> None:
    """Flush a folder of files to disk, and rename it to `place`: what is there is whole, also after a power cut."""
    for path in (*written.iterdir(), written):
        sync(path)
    written.rename(place)
    sync(place.parent)


@contextmanager
def _parents_of(folder: Path) -> Iterator[None]:
    """Create the parent folders; if the block fails, remove the new ones that are empty."""
    new: list[Path] = []
    try:
        try:
            require_folders(folder)
            new = [parent for parent in folder.parents if not parent.exists()]
            folder.parent.mkdir(parents=True, exist_ok=True)
        except ReheadError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise _resource(folder, error) from error
        yield
    except BaseException:
        for parent in new:
            with suppress(OSError):
                parent.rmdir()
        raise


def verify(folder: Path, only: str | None = None) -> dict[str, Any]:
    """Return the manifest of a published folder, after checking every file it lists, or `only` one of them.

    Raises IntegrityError naming the file that is missing, cut short or changed.
    """
    manifest = _manifest(folder)
    files = recorded(folder, manifest)
    if only is not None and only not in files:
        raise IntegrityError(f"{folder / only} is not recorded in {MANIFEST}: it was added later. Remove it.")
    try:
        _require_recorded(folder, files if only is None else {only: files[only]})
        if only is None:
            _require_nothing_else(folder, files)
    except OSError as error:  # unreadable, or just deleted by the run that it belongs to
        raise IntegrityError(f"{folder} cannot be read: {error.strerror}. Check its permissions.") from error
    return manifest


def recorded(folder: Path, manifest: dict[str, Any] | None = None) -> dict[str, tuple[int, str]]:
    """Return size and sha256 of the files that the manifest of a folder lists, unchecked."""
    try:
        files = (_manifest(folder) if manifest is None else manifest)["files"]
        listed = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
        if not "".join(listed).isprintable():  # rehead writes no such names, which would command a terminal
            raise ValueError(MANIFEST)
        # earlier manifests have them, too
        return {name: entry for name, entry in listed.items() if name not in FREE}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _incomplete(folder) from error


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = dict(strict_json(folder / MANIFEST, LARGEST))
        version = manifest["format"]
    except (ValueError, TypeError, KeyError) as error:  # InvalidInput is a ValueError
        raise _incomplete(folder) from error
    if version != FORMAT:
        raise IntegrityError(
            f"{folder / MANIFEST} has format={version!r:.40}, this version of rehead knows {FORMAT}: upgrade rehead."
        )
    return manifest


def _incomplete(folder: Path) -> IntegrityError:
    return IntegrityError(f"{folder / MANIFEST} is missing or unreadable: the folder is incomplete. {AGAIN}")


def _require_recorded(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Refuse a file that is missing or changed."""
    checked: Iterable[tuple[str, tuple[int, str]]] = files.items()
    if sum(size for size, _ in files.values()) >= LONG:
        checked = staged(checked, f"checking {folder}", len(files), "files")
    for name, (size, digest) in checked:
        path = folder / name
        if Path(name).name != name or not os.path.isfile(path):  # False where Path's would raise
            raise IntegrityError(f"{path} is missing: {MANIFEST} lists it. {AGAIN}")
        require_regular(path)
        if path.stat().st_size != size or sha256(path) != digest:
            raise IntegrityError(
                f"{path} is damaged: its bytes are not those that {MANIFEST} records. {AGAIN}"
            )


def _require_nothing_else(folder: Path, files: dict[str, tuple[int, str]]) -> None:
    """Refuse a file that the manifest does not list."""
    for path in sorted(folder.iterdir()):
        if path.suffix in READ and path.name not in files and path.name != MANIFEST:
            raise IntegrityError(f"{path} is not recorded in {MANIFEST}: it was added later. Remove it.")


def sha256(path: Path) -> str:
    """Return the hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recover(parent: Path, own: str = "", *, sole: bool = False) -> None:
    """Undo what killed processes began in `parent`: give a folder its name back, remove unpublished ones.

    A folder of another name than `own` is left alone where it cannot be locked, as its writer may live, unless this
    process is the `sole` writer; so is what another user left.
    """
    for old in parent.glob(f"{BEFORE}?*"):
        folder = old.with_name(old.name.removeprefix(BEFORE))
        with suppress(OSError), locked(old, needed=not (sole or folder.name == own)):
            if os.path.lexists(folder):
                with aside(parent, folder.name) as gone:
                    old.rename(gone / "old")
            else:
                old.rename(folder)
    sweep(parent.glob(f"{ASIDE}*"))


def standing(folder: Path) -> Path:
    """Return `folder`, or where it is while it is being replaced, if it has been taken away already."""
    if not folder.name or os.path.lexists(folder):  # "." has no name
        return folder
    old = folder.with_name(f"{BEFORE}{folder.name}")
    return old if old.is_dir() else folder


def require_folders(path: Path, *, itself: bool = False) -> None:
    """Raise InvalidInput for a path that leads through a file or, if `itself` is to be a folder, is one."""
    for place in (path, *path.parents) if itself else path.parents:
        if os.path.lexists(place) and not place.is_dir():
            what = "a file" if place.exists() else "a link to nothing"
            raise InvalidInput(f"{path} cannot be created: {place} is {what}. Choose a path in a folder.")


def _refuse_existing(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
        folder.rmdir()
    elif not overwrite:
        advice = ", or remove it first" if (folder / MANIFEST).is_file() else ""
        raise InvalidInput(f"{folder} exists: choose another name{advice}.")
    elif not (folder / MANIFEST).is_file():
        raise InvalidInput(
            f"{folder} was not written by rehead (it has no {MANIFEST}), so it is not replaced. Choose another name."
        )
    elif folder.is_symlink():
        raise InvalidInput(f"{folder} is a link to {folder.resolve()}: give that, or remove the link.")


def _refuse_file(file: Path) -> None:
    if os.path.lexists(file):
        raise InvalidInput(f"{file} exists: choose another name.")


def _swap(written: Path, folder: Path) -> None:
    """Exchange two folders: atomically, or, on a file system that cannot, so that `recover` undoes half of it."""
    try:
        exchange(written, folder)
    except OSError:
        old = folder.with_name(f"{BEFORE}{folder.name}")
        with locked(folder, shared=True, needed=False):
            folder.rename(old)
            try:
                written.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            with suppress(OSError):  # then the next call removes it
                old.rename(written)


def _write_manifest(aside: Path, mode: int) -> None:
    files = {}
    for path in sorted(aside.iterdir()):
        path.chmod(mode)
        sync(path)
        if path.name not in FREE:
            files[path.name] = {"bytes": path.stat().st_size, "sha256": sha256(path)}
    manifest = aside / MANIFEST
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1), encoding="utf-8")
    sync(manifest)
    sync(aside)


def _resource(folder: Path, error: Exception) -> ResourceError:
    match = OS_ERROR.search(str(error))
    number, remedy = int(match[1]) if match else getattr(error, "errno", None), "Nothing was published."
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Free some space, or choose a folder on another disk."
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "Choose a folder you may write to."
    return ResourceError(f"cannot write {folder}: {os.strerror(number) if number else error}. {remedy}")
