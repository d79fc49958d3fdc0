"""Runs a study: its jobs, one after another or in parallel, then the document of results."""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rehead.data.files import write_whole
from rehead.data.hold import LOCK, hold
from rehead.errors import Interrupted, UsageError
from rehead.registry import nearest
from rehead.stages import Stage, listening
from rehead.study.ahead import require_texts
from rehead.study.begun import RESULTS, require_no_others, require_same, require_same_texts
from rehead.study.costs import known_costs, measure_costs
from rehead.study.failures import Failures
from rehead.study.job import Job, one_source
from rehead.study.kv_dtype import known_formats, measure_formats
from rehead.study.parallel import run_parallel, stopped
from rehead.study.preset import Preset
from rehead.study.results import curves_csv, gather, runs_csv
from rehead.study.sharing import Sharing
from rehead.study.work import is_done, measured, run_job
from rehead.system.allocator import return_freed_memory

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

    `watch` gets every record of every job: those of its training and, by `event`, begin before them; measured
    after them, with the results in `found`, or failed; stage, with a `stage` of other long work; costs, before all
    variants are timed; and formats, before their caches are measured in several number formats. An interrupted study
    resumes when it is called again. If a job fails, those that do not start from it are made before its error is
    raised. Raises Busy if another process writes to its folder.
    """
    require_same(jobs)
    require_no_others(jobs)
    place = jobs[0].place
    with hold(place, lambda: any(file.name != LOCK for file in place.iterdir()), "system.work_dir"):
        return _run(preset, jobs, watch, command, n_process, fraction)


def study_one(preset: Preset, jobs: Sequence[Job], name: str, watch: Watch) -> Record:
    """Run the job whose folder is `name` below that of the study, and return its results, without a report.

    Several processes, also on several machines, may do so at once, each with another job. Raises UsageError for
    an unknown name, and for a job that starts from one that is not finished.
    """
    by_name = {name_of(job): job for job in jobs}
    if name not in by_name:
        raise UsageError(f"--only {name}: there is no such run.{nearest(name, list(by_name))}")
    job = by_name[name]
    if job.parent is not None and not is_done(job.parent, preset):
        raise UsageError(
            f"--only {name} starts from {name_of(job.parent)}, which is not finished: run that before."
        )
    unfinished(preset, [job], jobs)
    with Sharing(job.folder) as sharing, listening(partial(_report, watch, job)):
        for record in run_job(job, preset, sharing):
            watch(job, record)
    return measured(job)


def name_of(job: Job) -> str:
    """Return the folder of a job below that of its study, such as "two-heads/seed-0"."""
    return job.folder.relative_to(job.place).as_posix()


def unfinished(preset: Preset, jobs: Sequence[Job], whole: Sequence[Job] = ()) -> list[Job]:
    """Return the jobs that are still to be run, after a look at what is in their folders and at the study's texts.

    `whole` are all jobs of the study, if these are only some of them.
    """
    require_same(jobs)
    require_no_others(whole or jobs)
    missing = [job for job in jobs if not is_done(job, preset)]
    if missing:  # what is finished keeps its texts
        require_same_texts(whole or jobs)
    require_texts(missing, preset)
    return missing


def _run(
    preset: Preset,
    jobs: Sequence[Job],
    watch: Watch,
    command: Sequence[str],
    n_process: int,
    fraction: float,
) -> Record:
    """Run the jobs in a folder that this process has locked."""
    open_jobs = unfinished(preset, jobs)
    for job in jobs:
        if job not in open_jobs:
            watch(job, {"event": "measured", "found": measured(job)})
    failures = Failures()
    if n_process > 1 and len(open_jobs) > 1:
        run_parallel(open_jobs, preset, n_process, watch, failures)
    elif open_jobs:
        _run_in_turn(open_jobs, preset, watch, failures)
    failures.raise_first()
    costs, formats = _costs(jobs, watch), _formats(preset, jobs, watch)
    document = gather(preset, jobs, costs, formats, command, fraction)
    if document["prompt_note"] is not None:
        warnings.warn(document["prompt_note"], stacklevel=3)
    place = jobs[0].place
    text = json.dumps(document, indent=1, ensure_ascii=False)
    for name, content in (
        (RESULTS, text),
        ("runs.csv", runs_csv(document)),
        ("curves.csv", curves_csv(document)),
    ):
        write_whole(place / name, [content.encode()])
    return document


def _run_in_turn(jobs: Sequence[Job], preset: Preset, watch: Watch, failures: Failures) -> None:
    """Run one job after another, except those that start from one that failed."""
    with Sharing(jobs[0].place) as sharing:
        for job in jobs:
            if failures.stop(job.parent):
                continue
            with listening(partial(_report, watch, job)):
                try:
                    for record in run_job(job, preset, sharing):
                        watch(job, record)
                except Interrupted as error:  # which says how to continue that run alone
                    raise stopped(error.exit_code - 128) from error
                except Exception as error:
                    if not failures.add(job, error):
                        raise
                    watch(job, {"event": "failed"})
            return_freed_memory()


def _report(watch: Watch, job: Job, stage: Stage) -> None:
    watch(job, {"event": "stage", "stage": stage})


def _costs(jobs: Sequence[Job], watch: Watch) -> Record:
    """Return the costs of every variant and the machine they were measured on, now or before."""
    known = known_costs(jobs)
    if known is None:
        watch(jobs[0], {"event": "costs"})
        known = measure_costs(jobs, serving=one_source(jobs) is not None)
    return known


def _formats(preset: Preset, jobs: Sequence[Job], watch: Watch) -> Record:
    """Return what `measure_formats` found, now or before."""
    known = known_formats(preset, jobs)
    if known is None:
        require_same_texts(jobs)
        watch(jobs[0], {"event": "formats"})
        known = measure_formats(preset, jobs)
    return known
