"""A study from beginning to end: its jobs, one after another or several at once, then the document."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rehead.data.files import write_whole
from rehead.stages import Stage, listening
from rehead.study.ahead import require_texts
from rehead.study.begun import require_same
from rehead.study.costs import costs
from rehead.study.job import Job, one_source
from rehead.study.parallel import at_once
from rehead.study.preset import Preset
from rehead.study.results import curves_csv, gather, runs_csv
from rehead.study.sharing import Sharing
from rehead.study.work import is_done, measured, work
from rehead.training.hold import LOCK, hold

Record = dict[str, Any]
Watch = Callable[[Job, Record], None]


def study(
    preset: Preset,
    jobs: Sequence[Job],
    watch: Watch,
    *,
    command: Sequence[str],
    n_process: int = 1,
    fraction: float = 1.0,
) -> Record:
    """Do what is not done yet of `jobs`, and write results.json, runs.csv and curves.csv beside them.

    `watch` is given every record of every job: those of its training; `event` begin and, with what was `found`,
    measured around them; stage, with a `stage` of what takes long beside; and costs, before all are timed.
    Returns what results.json holds. Stopped anywhere and begun again, it finishes the rest. Raises Busy where
    another process writes there.
    """
    require_same(jobs)
    place = jobs[0].place
    with hold(place, lambda: any(file.name != LOCK for file in place.iterdir())):
        return _made(preset, jobs, watch, command, n_process, fraction)


def _made(
    preset: Preset,
    jobs: Sequence[Job],
    watch: Watch,
    command: Sequence[str],
    n_process: int,
    fraction: float,
) -> Record:
    """What `study` gives, in a folder that is this process's."""
    open_jobs = [job for job in jobs if not is_done(job, preset)]
    require_texts(open_jobs, preset)
    for job in jobs:
        if job not in open_jobs:
            watch(job, {"event": "measured", "found": measured(job)})
    if n_process > 1 and len(open_jobs) > 1:
        at_once(open_jobs, preset, n_process, watch)
    else:
        with Sharing(jobs[0].place) as sharing:
            for job in open_jobs:
                with listening(partial(_tell, watch, job)):
                    for record in work(job, preset, sharing):
                        watch(job, record)
    document = gather(preset, jobs, _costs(jobs, watch), command, fraction)
    place = jobs[0].place
    text = json.dumps(document, indent=1, ensure_ascii=False)
    for name, content in (
        ("results.json", text),
        ("runs.csv", runs_csv(document)),
        ("curves.csv", curves_csv(document)),
    ):
        write_whole(place / name, [content.encode()])
    return document


def _tell(watch: Watch, job: Job, stage: Stage) -> None:
    watch(job, {"event": "stage", "stage": stage})


def _costs(jobs: Sequence[Job], watch: Watch) -> dict[str, Record]:
    """Of every variant's first job; measured again only where one of them is another."""
    compared = [job for job in jobs if job.export is None]
    first = list({job.variant: job for job in reversed(compared)}.values())[::-1]
    serving = one_source(jobs) is not None
    file = jobs[0].place / "costs.json"
    told = [job.description() for job in first]
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["of"] == told:
            return dict(known["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    watch(first[0], {"event": "costs"})
    found = costs(first, serving=serving)
    write_whole(file, [json.dumps({"of": told, "costs": found}).encode()])
    return found
