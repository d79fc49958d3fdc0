"""Checks what is already in the folder of a study, before anything is trained."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rehead.config import flags
from rehead.conversion.texts import SELF
from rehead.data import Source, named, source_of
from rehead.data.files import read as read_text
from rehead.data.files import write_whole
from rehead.data.text import CHUNK
from rehead.errors import InvalidInput, ReheadError
from rehead.study.job import Job, folder_of, same_source
from rehead.training.folder import RunFolder

Record = dict[str, Any]
BEGUN, RESULTS = "job.json", "results.json"
FREE = (
    "data.path", "data.name",  # see require_same_texts
    "trainer.device", "trainer.keep", "trainer.save_every", "trainer.save_async",
    "trainer.sample_every", "trainer.sample_tokens", "trainer.sample_prompt", "trainer.sample_temperature",
    "trainer.sample_top_k", "trainer.report_to",
)  # fmt: skip
"""Options that may change between calls: neither the model nor its loss curve depends on them."""


def require_same(jobs: Sequence[Job]) -> None:
    """Raise InvalidInput for the folder of a run, and for jobs that began with other options. Changes nothing."""
    place = jobs[0].place
    if RunFolder(place).begun:
        raise InvalidInput(
            f"{place} is a run of rehead train, and a study needs its own folder: choose another system.work_dir."
        )
    for job in jobs:
        now, before = job.description(), _begun(job)
        try:
            changes = list(dict.fromkeys(change for was in before for change in _changes(was, now)))
        except (TypeError, AttributeError, KeyError) as error:
            raise InvalidInput(f"{job.folder / BEGUN} is not what a study writes: remove it.") from error
        if changes:
            raise InvalidInput(
                f"{job.folder} was made with {'; '.join(changes[:3])}. Nothing was changed: give the same options "
                "again, or choose another system.work_dir."
            )


def require_no_others(jobs: Sequence[Job]) -> None:
    """Raise InvalidInput for a folder whose report has other jobs than these, which are all of one study."""
    place = jobs[0].place
    if others := sorted(_reported(place) - {job.folder for job in jobs}):
        names = ", ".join(str(folder.relative_to(place)) for folder in others[:3])
        raise InvalidInput(
            f"{place} has a study of other runs ({names}{', ...' if len(others) > 3 else ''}), whose report would be "
            "replaced. Nothing was changed: give all its variants and seeds again, or choose another system.work_dir."
        )


def _reported(place: Path) -> set[Path]:
    """Return the folders of the jobs in the report of a study; none if there is no report."""
    document = read(place / RESULTS) or {}
    try:
        made = [(one["variant"], run["seed"]) for one in document.get("variants", ()) for run in one["runs"]]
        made += [(one["variant"], one["seed"]) for one in document.get("exports", ())]
        return {folder_of(place, title, seed) for title, seed in made}
    except (TypeError, AttributeError, KeyError) as error:
        raise InvalidInput(f"{place / RESULTS} is not what a study writes: move it.") from error


def require_same_texts(jobs: Sequence[Job]) -> None:
    """Raise InvalidInput if a job's text has changed since the job began: what is made now would use the new text."""
    now: dict[Source, str | None] = {}
    for job in jobs:
        before = (read(job.folder / BEGUN) or {}).get("texts", [])
        for source, was in zip(_sources(job), before, strict=False):
            if source not in now:
                now[source] = _identity(source)
            if None not in (was, now[source]) and was != now[source]:
                raise InvalidInput(
                    f"{job.folder} was made with another text than {source.path or source.name} is now. Nothing was "
                    "changed: give the text as it was, or choose another system.work_dir."
                )


def note(job: Job) -> None:
    """Write the description of a job, and what tells its texts from others, into its folder."""
    before = (read(job.folder / BEGUN) or {}).get("texts", [])
    texts = [_identity(source) for source in _sources(job)]
    texts = [now or was for now, was in zip_longest(texts, before)]  # of a text that is gone, what it was
    described = job.description() | {"texts": texts}
    write_whole(job.folder / BEGUN, [json.dumps(described, indent=1).encode()])


def read(file: Path) -> Record | None:
    """Read a table that a study wrote; None if it is missing, incomplete or no table."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _sources(job: Job) -> list[Source]:
    """Return the texts that a job reads: its own first, then those of its conversion."""
    reading = {} if job.convert is None else job.reading
    names = [*reading.get("calibration", ()), *filter(None, [reading.get("test")])]
    return [source_of(job.options.data), *(named(name, "convert") for name in names if name != SELF)]


def _identity(source: Source) -> str | None:
    """Return the sha256 of a text, or the name of a corpus; None for a text that cannot be read."""
    if source.path is None:
        return source.name
    digest = hashlib.sha256()
    try:
        for part in read_text(source.path, CHUNK):
            digest.update(part.encode())
    except ReheadError:
        return None
    return digest.hexdigest()


def _begun(job: Job) -> list[Record]:
    """Return descriptions of what is in the job's folder: the study's, and of the options it was trained with last.

    The latter differ if the run was trained, or trained further, by hand.
    """
    noted, config = read(job.folder / BEGUN), RunFolder(job.folder).config
    found = [] if noted is None else [noted]
    if job.is_trained and config.exists():
        found.append(replace(job, options=flags.read([], (config,))).description())
    return found


def _changes(before: Record, now: Record) -> Iterator[str]:
    """Yield changes as "key=before (now after)"; options matter only for a job that was trained."""
    trained = all(now.get(key) is None for key in ("convert", "export", "source"))
    for group, keys in before.get("options", {}).items() if trained else ():
        for key, was in keys.items():
            name, options = f"{group}.{key}", now["options"].get(group, {})
            if name not in FREE and key in options and options[key] != was:
                yield f"{name}={was} (now {options[key]})"
    for name, stamp in now.get("stamps", {}).items():  # a study of an older version noted none
        if name in before.get("stamps", {}) and not same_source(before["stamps"][name], stamp):
            yield f"another model in {name}, written again since"
    for key in ("convert", "heal", "export"):
        if before.get(key) != now.get(key):
            yield f"{key}={before.get(key)} (now {now.get(key)})"
    was, source = before.get("source"), now.get("source")
    if not same_source(was, source):
        places = [None if stamp is None else stamp["folder"] for stamp in (was, source)]
        again = ", written again since" if places[0] == places[1] else ""
        yield f"source={places[0]} (now {places[1]}{again})"
    old, new = before.get("from"), now["from"]
    if (old is None) != (new is None) or (old and new and any(_changes(old, new))):
        yield "another model to start from"
