"""Shows a study of one model on the terminal step by step, each step with its own command."""

import shlex
from collections.abc import Sequence
from typing import Any

from rehead.conversion.folder import read_plannable
from rehead.conversion.plan import plan
from rehead.data.text import EMBEDDED
from rehead.report.progress import Board
from rehead.report.shrink import percent, proof, span
from rehead.report.text import sanitise
from rehead.study import Job

Record = dict[str, Any]
DOES = {
    "given": "Take a model",
    "trained": "Train a model",
    "converted": "Convert it",
    "healed": "Heal a conversion",
    "exported": "Export a result",
}


class Story:
    """Prints what each job does when it begins, and its result, in lines of `board`."""

    def __init__(self, jobs: Sequence[Job], board: Board) -> None:
        self._jobs, self._board, self._begun = list(jobs), board, set[int]()

    def show(self, job: Job, record: Record) -> None:
        """Print a record of `rehead.study` about a job, other than those of training."""
        if record["event"] == "costs":
            about = "The variants take turns, so that a slow phase of the machine affects all of them."
            command = _typed("bench", self._jobs[-1].model)
            self._head(len(self._jobs) + 2, "Measure how fast each decodes", about, command)
            return
        if record["event"] == "formats":
            about = "Every query reads keys and values, or latents, rounded to each format."
            self._head(len(self._jobs) + 3, "Measure caches in other number formats", about, self._rounded())
            return
        self._begin(job)
        if record["event"] != "measured":
            return
        for line in outcome(job, record["found"]):
            self._board.say(f"   {line}")
        if job is self._jobs[0]:
            self._plan(job)

    def _rounded(self) -> str:
        """Return a command that evaluates the last conversion in another format; without a test text, plans it."""
        conversions = [job for job in self._jobs if job.convert is not None]
        if "test" in conversions[0].reading:
            text = conversions[0].reading["test"]
            return _typed("eval", conversions[-1].model, "--data", text, "--kv-dtype", "fp8")
        return _typed("plan", conversions[-1].model, "--kv-dtype", "fp8")

    def _begin(self, job: Job) -> None:
        at = self._jobs.index(job)
        if at in self._begun:
            return
        self._begun.add(at)
        number = at + 1 + (at > 0)  # the plan is the second step
        self._head(number, f"{DOES[job.kind]}: {sanitise(job.variant, 60)}", job.about, job.command())

    def _plan(self, job: Job) -> None:
        """Print the plan of the source."""
        context = job.options.data.block_size
        planned = plan(read_plannable(job.model), context)
        about = "The size of each smaller cache, computed from the config alone."
        self._head(2, "Plan", about, _typed("plan", job.model, "--context", context))
        full = planned.rows[0].kv_bytes_per_token
        for row in planned.rows[1:]:
            if row.verdict in ("exact", "approximate"):
                share = percent(row.kv_bytes_per_token / full)
                self._board.say(f"   {row.verdict:11}  {share:>6} of the KV cache  {row.command}")
        self._board.say(f"   {planned.advice}")

    def _head(self, number: int, title: str, about: str, command: str) -> None:
        self._board.say(f"\n{number}. {title}. {sanitise(about, 500)}".rstrip())
        self._board.say(f"   $ {sanitise(command, 4000)}", faint=True)


def _typed(*words: object) -> str:
    """Return a command of rehead as it is typed in a shell."""
    return shlex.join(["rehead", *map(str, words)])


def outcome(job: Job, results: Record) -> list[str]:
    """Return the result of a job in a line or two."""
    if job.kind == "exported":
        return [f"{proof(results['read_back'])}."]
    certificate = results["certificate"]
    if certificate is None:
        data = job.options.data
        text = "text it was not trained on"
        if job.kind == "given":
            text = f"the end of {data.path or f'the corpus {data.name or EMBEDDED}'}"
        return [f"loss {results['val_loss']:.4f} nats per token on {text}"]
    before, after = certificate["kv_bytes_per_token"]
    size = f"KV cache {before:,} -> {after:,} bytes per token ({percent(after / before)})"
    logits = certificate["logits"]
    same = f"{100 - 100 * logits['argmax_flips']:.1f} % of the likeliest tokens stay the same"
    if certificate["exact"]:
        return [f"exact: {size}", f"no logit differs by more than {logits['max_error']:.1e}"]
    if certificate["loss"] is None:
        return [f"approximate: {size}", same]
    old, new = certificate["loss"]
    return [f"approximate: {size}", f"loss {old:.4f} -> {new:.4f} ({span([new - old] * 3)}), {same}"]
