"""Intermediate results of a conversion, kept beside its destination until it is done, so that it can resume."""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rehead.checkpoint.files.kept import FIGURES, kept_figures
from rehead.checkpoint.files.opened import changed
from rehead.checkpoint.files.publish import READ, recorded, require_folders
from rehead.conversion.certificate import CERTIFICATE
from rehead.data.files import write_whole
from rehead.data.hold import LOCK, hold
from rehead.errors import IntegrityError, InvalidInput, ReheadError, ResourceError, UsageError
from rehead.system.aside import ASIDE, discard
from rehead.system.open_files import allow_open_files

log = logging.getLogger("rehead")
SUFFIX = ".unfinished"
OWN = re.compile(rf"\{LOCK}|result|passes|text(-\w+)*|[0-9a-f]{{16}}|\{ASIDE}.*")
"""Names of what is kept in such a folder."""
READ_FROM_TEXT = re.compile(r"(states|gradients|statistics|taught)-\d+")
"""Names of what was worked out from a text."""
RESULT = "result"
"""The file, in the folder of an unfinished conversion, that has the sha256 of its certificate."""


@contextmanager
def unfinished(
    destination: Path,
    *,
    resume: bool,
    flag: str = "--resume",
    work: str = "conversion",
    choose: str = "destination",
) -> Iterator[Path]:
    """Yield the folder DESTINATION.unfinished, locked, to keep work in.

    It is removed at the end, and after a ReheadError unless that ends a resumed conversion, or says that space or
    memory ran out when more was done than exact layers. It stays if a process is interrupted or killed: the next
    conversion to `destination` then needs `resume`, which users write as `flag`. If it was killed after `destination`
    was published, the next conversion in the same parent folder removes it.
    `work` is what messages call it, `choose` the option that names another folder.
    Raises UsageError if `resume` is needed but not given or there is nothing to resume, Busy if another process
    converts to `destination`.
    """
    require_folders(destination)
    allow_open_files()  # every layer that is kept has one
    _sweep(destination.parent)
    folder = destination.with_name(destination.name + SUFFIX)
    _require_own(folder, choose)
    if resume and not folder.is_dir():
        raise UsageError(f"{folder} does not exist: there is nothing to resume. Leave {flag} out.")
    keep = True
    with hold(folder, lambda: keep, choose):
        if not resume and _done(folder):
            raise UsageError(
                f"{folder} holds an interrupted {work}: use {flag}, or remove the folder to start again."
            )
        try:
            yield folder
            keep = False
        except ReheadError as error:
            keep = _is_worth_keeping(folder, error, resume=resume)
            raise
        finally:
            keep = keep and _done(folder)
            if keep:
                log.info("%s keeps what is done: %s continues from there", folder, flag)
            else:
                _clear(folder)
    if not keep:
        with suppress(OSError):
            folder.rmdir()


def _require_own(folder: Path, choose: str) -> None:
    """Refuse a folder with anything that no conversion or teaching keeps: it would be removed at the end."""
    held = (place.name for place in folder.iterdir()) if folder.is_dir() else ()
    for name in held:
        if not (OWN.fullmatch(name) or name.startswith(".")):  # such as .DS_Store, which is left where it is
            raise InvalidInput(
                f"{folder} holds {name}, which is not part of unfinished work and would be removed. Move it away, or "
                f"choose another {choose}."
            )


def fingerprint(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files that a model is read from. Raises IntegrityError if they are gone."""
    try:
        files = sorted(place for place in folder.iterdir() if place.suffix in READ)
        return [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise changed(folder) from error


def place_of(folder: Path, **made_of: object) -> Path:
    """Create and return the folder in `folder` for what is made of these (JSON); work made of others is not used."""
    place = folder / digest(made_of)
    if not place.exists() and _done(folder):
        log.info("%s is from another source, text, seed, device or version: starting again", folder)
    place.mkdir(exist_ok=True)
    return place


def digest(made_of: object) -> str:
    """Return a name for what is made of this, JSON."""
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def note_result(folder: Path, certificate: str) -> None:
    """Write down in `folder` the certificate of what is about to be published: once it is, `folder` is not needed."""
    write_whole(folder / RESULT, [hashlib.sha256(certificate.encode()).hexdigest().encode()])


def _sweep(parent: Path) -> None:
    """Remove the kept work in `parent` whose result is published, left by a process that was killed then."""
    for folder in parent.glob(f"*{SUFFIX}"):
        destination = folder.with_name(folder.name.removesuffix(SUFFIX))
        with suppress(OSError, ReheadError):  # such as Busy
            _, published = recorded(destination).get(CERTIFICATE, (0, ""))
            if published.encode() == (folder / RESULT).read_bytes():
                with hold(folder, lambda: False, "destination"):
                    _clear(folder)
                folder.rmdir()
                log.info("removed %s: its result is in %s", folder, destination)


def _done(folder: Path) -> bool:
    """Whether anything is kept in `folder`."""
    return any(any(place.iterdir()) for place in _places(folder))


def _is_worth_keeping(folder: Path, error: ReheadError, *, resume: bool) -> bool:
    """Whether kept work outlives an error: of a resumed conversion, or where space or memory ran out."""
    if isinstance(error, IntegrityError):  # what was worked out may be of a changed source
        return False
    return resume or (isinstance(error, ResourceError) and _took_long(folder))


def _took_long(folder: Path) -> bool:
    """Whether anything is kept that a text gave, or a layer that lost something: exact layers are soon made again."""
    layers = (file.parent for file in folder.glob(f"*/layers-*/*/{FIGURES}"))
    return any(READ_FROM_TEXT.fullmatch(place.name) for place in folder.rglob("*")) or any(
        kept_figures(layer)[0] > 0 for layer in layers
    )


def _places(folder: Path) -> Iterator[Path]:
    """Yield the folders of kept work in `folder`."""
    return (place for place in folder.iterdir() if place.is_dir() and not place.name.startswith(ASIDE))


def _clear(folder: Path) -> None:
    """Remove all but the lock; last of all the file that tells `_sweep` that the rest may be removed."""
    for place in sorted(folder.iterdir(), key=lambda place: place.name == RESULT):
        if place.name.startswith(ASIDE):
            shutil.rmtree(place, ignore_errors=True)
        elif place.name == LOCK or not OWN.fullmatch(place.name):
            continue
        elif place.is_dir():
            discard(place)
        else:
            place.unlink()
