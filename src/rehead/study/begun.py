"""What already lies where a study is to go, looked at before anything is trained."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rehead.config import flags
from rehead.data.files import write_whole
from rehead.errors import InvalidInput
from rehead.study.job import Job
from rehead.training.folder import RunFolder

Record = dict[str, Any]
BEGUN = "job.json"
FREE = (
    "data.path", "data.name",  # a run looks at the text itself
    "trainer.device", "trainer.keep", "trainer.save_every",
    "trainer.sample_every", "trainer.sample_tokens", "trainer.sample_prompt", "trainer.sample_temperature",
    "trainer.sample_top_k",
)  # fmt: skip
"""Options that may change from one call to the next: neither the model nor its curve depends on them."""


def require_same(jobs: Sequence[Job]) -> None:
    """Refuse a folder that is somebody's run, and jobs that were begun with other options. Changes nothing."""
    place = jobs[0].place
    if RunFolder(place).begun:
        raise InvalidInput(
            f"{place} is a run of rehead train, and a study takes a folder of its own: choose another system.work_dir."
        )
    for job in jobs:
        before = _begun(job)
        changes = [] if before is None else list(_changes(before, job.description()))
        if changes:
            raise InvalidInput(
                f"{job.folder} was made with {'; '.join(changes[:3])}. Nothing was changed: give the options it was "
                "made with, or choose another system.work_dir."
            )


def note(job: Job) -> None:
    """Write down in the job's folder what it is."""
    write_whole(job.folder / BEGUN, [json.dumps(job.description(), indent=1).encode()])


def read(file: Path) -> Record | None:
    """A table that a study wrote, None where it is not there or was cut short."""
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _begun(job: Job) -> Record | None:
    """The description of what lies in the job's folder, if something does; a run may have been trained by hand."""
    run = RunFolder(job.folder)
    found = read(job.folder / BEGUN)
    if found is None and run.config.exists():
        return job.description() | {"options": asdict(flags.read([], (run.config,)))}
    return found


def _changes(before: Record, now: Record) -> Iterator[str]:
    """Each as "key=before (now after)"; of what was not trained only what it was made of and how."""
    trained = all(now.get(key) is None for key in ("convert", "export", "source"))
    for group, keys in before.get("options", {}).items() if trained else ():
        for key, was in keys.items():
            name, options = f"{group}.{key}", now["options"].get(group, {})
            if name not in FREE and key in options and options[key] != was:
                yield f"{name}={was} (now {options[key]})"
    for key in ("convert", "heal", "export"):
        if before.get(key) != now.get(key):
            yield f"{key}={before.get(key)} (now {now.get(key)})"
    was, source = before.get("source"), now.get("source")
    if was != source:
        places = [None if one is None else one["folder"] for one in (was, source)]
        again = ", written again since" if places[0] == places[1] else ""
        yield f"source={places[0]} (now {places[1]}{again})"
    old, new = before.get("from"), now["from"]
    if (old is None) != (new is None) or (old and new and any(_changes(old, new))):
        yield "another model to start from"
