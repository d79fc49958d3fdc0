"""Runs a study on a Slurm cluster: a batch job per run, and one that measures the costs and writes the report."""

import json
import logging
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from submitit import SlurmExecutor

from rehead.data.files import write_whole
from rehead.data.hold import LOCK, hold
from rehead.errors import Interrupted, ResourceError, UsageError
from rehead.registry import nearest
from rehead.stages import staged
from rehead.study.begun import read
from rehead.study.costs import known_costs
from rehead.study.job import Job
from rehead.study.kv_dtype import known_formats
from rehead.study.preset import Preset
from rehead.study.run import name_of, unfinished
from rehead.study.work import is_done
from rehead.training.interrupt import Stop, stop_signals

log = logging.getLogger("rehead")
REPORT = "report"
RECORD = "jobs.json"
OURS = (
    "additional_parameters", "array_parallelism", "dependency", "job_name", "nodes", "ntasks_per_node",
    "num_gpus", "setup", "srun_args", "stderr_to_stdout", "teardown", "use_srun",
)  # fmt: skip
"""Parameters of submitit that are set here, or are no text."""
SAVING = 90
"""Seconds before a job's time is up at which it is told to save."""
TURN, LONGEST = 0.2, 60.0
"""Seconds between two checks for a signal, and most seconds between two calls of squeue."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch job: its command line, and the names of the batch jobs that must succeed before it starts."""

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...]


class Scripts(SlurmExecutor):  # type: ignore[misc]
    """Writes the scripts of batch jobs that run a command line; submitit's own run a pickled function.

    `options` are those of sbatch as name=value, with submitit's names. Raises UsageError for unknown ones.
    """

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        super().__init__(folder)
        known = sorted(self._valid_parameters() - set(OURS))
        settings = dict[str, str]()
        for option in options:
            name, _, value = option.partition("=")
            if name not in known:
                raise UsageError(f"--slurm {option}: unknown, or set by rehead.{nearest(name, known)}")
            if not value:
                raise UsageError(f"--slurm {option}: expected a value, as in {name}=VALUE.")
            settings[name] = value
        saving = settings.get("signal_delay_s", SAVING)
        more = {"kill-on-invalid-dep": "yes", "signal": f"TERM@{saving}"}
        self.update_parameters(**{"time": None, "wckey": None, **settings, "additional_parameters": more})

    @classmethod
    def affinity(cls) -> int:
        """Return 2, also without Slurm, where scripts can be written but not submitted."""
        return 2

    def write(self, batch: Batch, ids: Mapping[str, str]) -> str:
        """Return a script. A job that it waits for is written by its id or, if it has none yet, by its name."""
        after = ":".join(ids.get(name, name) for name in batch.after)
        self.update_parameters(job_name=batch.name, dependency=f"afterok:{after}" if after else None)
        return str(self._make_submission_file_text(shlex.join(batch.command), ""))


def batches(jobs: Sequence[Job], command: Sequence[str]) -> list[Batch]:
    """Return a batch job for each of `jobs`, parents first, and the one of the report.

    `command` is that of the study, from "rehead" on.
    """
    python = (sys.executable, "-m", *command)
    runs = [
        Batch(
            name=name_of(job),
            command=(*python, "--only", name_of(job)),
            after=() if job.parent is None or job.parent not in jobs else (name_of(job.parent),),
        )
        for job in jobs
    ]
    return [*runs, Batch(name=REPORT, command=python, after=tuple(batch.name for batch in runs))]


def scripts(
    preset: Preset, jobs: Sequence[Job], command: Sequence[str], options: Sequence[str]
) -> dict[str, str]:
    """Return the scripts that `run_on_slurm` would submit, by name. Nothing is written or submitted."""
    writer = Scripts(_folder(jobs), options)
    return {batch.name: writer.write(batch, {}) for batch in batches(unfinished(preset, jobs), command)}


def run_on_slurm(preset: Preset, jobs: Sequence[Job], command: Sequence[str], options: Sequence[str]) -> None:
    """Run what a study lacks as batch jobs, and wait until none of them is queued or running.

    Batch jobs of an earlier call that are still queued or running are not submitted again. A signal ends the waiting,
    not the jobs. Raises ResourceError without Slurm, for a job that sbatch refuses, and for one that failed.
    """
    place = _folder(jobs)
    writer = Scripts(place, options)
    if shutil.which("sbatch") is None:
        raise ResourceError(
            "--launcher slurm: there is no sbatch here. Use a machine that submits jobs, or look with --dry-run."
        )
    missing = unfinished(preset, jobs)
    if not missing and _measured(preset, jobs):
        return
    with stop_signals() as stop:
        with hold(place, lambda: any(file.name != LOCK for file in place.iterdir()), "system.work_dir"):
            ids = _submit(batches(missing, command), writer, place)
        for _ in staged(_ended(set(ids.values()), stop), "waiting for Slurm", len(ids), "jobs"):
            pass
    lost = [name_of(job) for job in missing if not is_done(job, preset)]
    if not lost and not _measured(preset, jobs):
        lost = [REPORT]
    if lost:
        said = place / f"{ids[lost[0]]}_0_log.err"
        words = said.read_text(errors="replace").split("rehead: ") if said.exists() else [""]
        raise ResourceError(
            f"{len(lost)} of {len(ids)} jobs ended without a result, first {lost[0]} (job {ids[lost[0]]}): "
            f"{words[-1].strip() or 'it wrote nothing'}. Logs are in {place}. Repeat the command to submit them again."
        )


def _measured(preset: Preset, jobs: Sequence[Job]) -> bool:
    """Return True if all that the last batch job measures is known."""
    return known_costs(jobs) is not None and known_formats(preset, jobs) is not None


def _submit(wanted: Sequence[Batch], writer: Scripts, place: Path) -> dict[str, str]:
    """Return the id of every batch job; submit those that are not in the queue.

    A queued job with another command, or that does not wait for all it now must, is cancelled and submitted again.
    """
    known = read(place / RECORD) or {}
    queue = _queue()
    ids = dict[str, str]()
    for batch in wanted:
        after = [ids[name] for name in batch.after]
        before = known.get(batch.name)
        if before is not None and before["id"] in queue:
            if before["command"] == list(batch.command) and set(after) <= set(before["after"]):
                ids[batch.name] = before["id"]
                continue
            _ask("scancel", before["id"])
        file = place / f"{batch.name.replace('/', '-')}.sh"
        write_whole(file, [writer.write(batch, ids).encode()])
        ids[batch.name] = _ask("sbatch", "--parsable", str(file)).partition(";")[0].strip()
        known[batch.name] = {"id": ids[batch.name], "after": after, "command": batch.command}
        write_whole(place / RECORD, [json.dumps(known, indent=1).encode()])
        log.info("%s is job %s", batch.name, ids[batch.name])
    return ids


def _ended(ids: set[str], stop: Stop) -> Iterator[str]:
    """Yield the id of each batch job that has left the queue. Raises Interrupted after a signal."""
    begun = asked = time.monotonic()
    while ids:
        now = time.monotonic()
        if now >= asked + min(LONGEST, (asked - begun) / 10 + 1):
            asked = now
            try:
                ended = ids - _queue()
            except ResourceError as error:
                log.warning("%s; asking again", error)
                continue
            yield from sorted(ended)
            ids -= ended
        if stop.signal is not None:
            raise Interrupted(
                f"stopped waiting, and {len(ids)} jobs go on: repeat the command to wait for them again, or end them "
                f"with scancel {' '.join(sorted(ids))}",
                stop.signal,
            )
        time.sleep(TURN)


def _queue() -> set[str]:
    """Return the ids of the user's batch jobs that are queued or running."""
    return set(_ask("squeue", "--me", "--noheader", "--format=%A").split())


def _ask(*command: str) -> str:
    """Return what a command of Slurm prints; Ctrl-C does not reach it. Raises ResourceError with its error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise ResourceError(f"{shlex.join(command)}: {words[-1] if words else f'status {done.returncode}'}")
    return done.stdout


def _folder(jobs: Sequence[Job]) -> Path:
    """Return the folder of the scripts and logs of a study's batch jobs."""
    return jobs[0].place / "slurm"
