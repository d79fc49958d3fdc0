"""A study of one model, told on the terminal step by step, each with the command that does it alone."""

from collections.abc import Sequence
from typing import Any

from rehead.conversion.folder import read_plannable
from rehead.conversion.plan import plan
from rehead.report.progress import Board
from rehead.report.shrink import percent, proof, span
from rehead.report.text import harmless
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
    """Says what each job does when it begins, and what came of it, in lines of `board`."""

    def __init__(self, jobs: Sequence[Job], board: Board) -> None:
        self._jobs, self._board, self._begun = list(jobs), board, set[int]()

    def show(self, job: Job, record: Record) -> None:
        """A record of `rehead.study` about a job, beside those of its training."""
        if record["event"] == "costs":
            about = "All variants decode in turns, so that what slows the machine slows all of them."
            command = f"rehead bench {self._jobs[-1].model}"
            self._head(len(self._jobs) + 2, "Measure how fast each decodes", about, command)
            return
        self._begin(job)
        if record["event"] != "measured":
            return
        for line in outcome(job, record["found"]):
            self._board.say(f"   {line}")
        if job is self._jobs[0]:
            self._plan(job)

    def _begin(self, job: Job) -> None:
        at = self._jobs.index(job)
        if at in self._begun:
            return
        self._begun.add(at)
        number = at + 1 + (at > 0)  # the plan is the second step
        self._head(number, f"{DOES[job.kind]}: {harmless(job.variant, 60)}", job.about, job.command())

    def _plan(self, job: Job) -> None:
        """What `rehead plan` says of the source."""
        context = job.options.data.block_size
        found = plan(read_plannable(job.model), context)
        about = "What each smaller cache would be, from the shape of the model alone."
        self._head(2, "Plan", about, f"rehead plan {job.model} --context {context}")
        full = found.rows[0].kv_bytes_per_token
        for row in found.rows[1:]:
            if row.verdict in ("exact", "approximate"):
                share = percent(row.kv_bytes_per_token / full)
                self._board.say(f"   {row.verdict:11}  {share:>6} of the KV cache  {row.command}")
        self._board.say(f"   {found.advice}")

    def _head(self, number: int, title: str, about: str, command: str) -> None:
        self._board.say(f"\n{number}. {title}. {harmless(about, 500)}".rstrip())
        self._board.say(f"   $ {harmless(command, 4000)}", faint=True)


def outcome(job: Job, found: Record) -> list[str]:
    """What came of a job, in a line or two."""
    if job.kind == "exported":
        return [f"{proof(found['read_back'])}."]
    certificate = found["certificate"]
    if certificate is None:
        text = "the end of data.path" if job.kind == "given" else "text it was not trained on"
        return [f"loss {found['val_loss']:.4f} nats per token on {text}"]
    before, after = certificate["kv_bytes_per_token"]
    size = f"KV cache {before:,} -> {after:,} bytes per token ({percent(after / before)})"
    logits = certificate["logits"]
    kept = f"{100 - 100 * logits['argmax_flips']:.1f} % of the likeliest tokens stay"
    if certificate["exact"]:
        return [f"exact: {size}", f"no logit differs by more than {logits['max_error']:.1e}"]
    if certificate["loss"] is None:
        return [f"approximate: {size}", kept]
    old, new = certificate["loss"]
    return [f"approximate: {size}", f"loss {old:.4f} -> {new:.4f} ({span([new - old] * 3)}), {kept}"]
