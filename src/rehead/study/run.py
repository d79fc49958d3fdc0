"""Runs a study: its jobs, one after another or in parallel, then the document of results."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rehead.data.files import write_whole
from rehead.data.hold import LOCK, hold
from rehead.stages import Stage, listening
from rehead.study.ahead import require_texts
from rehead.study.begun import require_same
from rehead.study.costs import costs
from rehead.study.job import Job, one_source
from rehead.study.parallel import run_parallel
from rehead.study.preset import Preset
from rehead.study.results import curves_csv, gather, runs_csv
from rehead.study.sharing import Sharing
from rehead.study.work import is_done, measured, run_job

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
    """Run the unfinished `jobs`, and write results.json, runs.csv and curves.csv; return the content of results.json.

    `watch` gets every record of every job: those of its training; before them `event` begin, after them
    measured, with the results in `found`; stage, with a `stage` of other long work; and costs, before all
    variants are timed. A study that was interrupted resumes when it is called again. Raises Busy if another
    process writes to its folder.
    """
    require_same(jobs)
    place = jobs[0].place
    with hold(place, lambda: any(file.name != LOCK for file in place.iterdir()), "system.work_dir"):
        return _run(preset, jobs, watch, command, n_process, fraction)


def _run(
    preset: Preset,
    jobs: Sequence[Job],
    watch: Watch,
    command: Sequence[str],
    n_process: int,
    fraction: float,
) -> Record:
    """Run the jobs in a folder that this process has locked."""
    open_jobs = [job for job in jobs if not is_done(job, preset)]
    require_texts(open_jobs, preset)
    for job in jobs:
        if job not in open_jobs:
            watch(job, {"event": "measured", "found": measured(job)})
    if n_process > 1 and len(open_jobs) > 1:
        run_parallel(open_jobs, preset, n_process, watch)
    else:
        with Sharing(jobs[0].place) as sharing:
            for job in open_jobs:
                with listening(partial(_report, watch, job)):
                    for record in run_job(job, preset, sharing):
                        watch(job, record)
    document = gather(preset, jobs, _costs(jobs, watch), command, fraction)
    if document["prompt_note"] is not None:
        warnings.warn(document["prompt_note"], stacklevel=3)
    place = jobs[0].place
    text = json.dumps(document, indent=1, ensure_ascii=False)
    for name, content in (
        ("results.json", text),
        ("runs.csv", runs_csv(document)),
        ("curves.csv", curves_csv(document)),
    ):
        write_whole(place / name, [content.encode()])
    return document


def _report(watch: Watch, job: Job, stage: Stage) -> None:
    watch(job, {"event": "stage", "stage": stage})


def _costs(jobs: Sequence[Job], watch: Watch) -> dict[str, Record]:
    """Return the costs of every variant's first job, measured again only if one of the jobs has changed."""
    compared = [job for job in jobs if job.export is None]
    first = list({job.variant: job for job in reversed(compared)}.values())[::-1]
    serving = one_source(jobs) is not None
    file = jobs[0].place / "costs.json"
    described = [job.description() for job in first]
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        if known["of"] == described:
            return dict(known["costs"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    watch(first[0], {"event": "costs"})
    measured_costs = costs(first, serving=serving)
    write_whole(file, [json.dumps({"of": described, "costs": measured_costs}).encode()])
    return measured_costs
