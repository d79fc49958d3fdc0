"""The results of a study in one document: every variant over its seeds, and the claims they support."""

import csv
import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rehead.config import GPTConfig
from rehead.conversion.folder import plannable_dtype, read_plannable
from rehead.conversion.plan import plan
from rehead.measure import parameters
from rehead.study.claims import claims
from rehead.study.grid import overridden
from rehead.study.job import Job, one_source
from rehead.study.preset import PANELS, Preset, Question
from rehead.study.prompt import prompt_note
from rehead.study.work import measured

Record = dict[str, Any]


FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet may take for a formula."""


def gather(
    preset: Preset,
    jobs: Sequence[Job],
    measured_costs: Record,
    formats: Record,
    command: Sequence[str],
    fraction: float,
) -> Record:
    """Return the document that is written as results.json and shown as a report.

    `measured_costs` is the content of costs.json, `formats` what `study.kv_dtype` measured. A claim compares a
    variant's validation losses with those of the question's first variant, if the two are comparable. `told_apart`
    needs at least two seeds of both, and a difference that seeds alone rarely make (`study.chance`), with as many
    comparisons as the question has.
    """
    by_variant: dict[str, list[Job]] = {}
    for job in jobs:
        if job.export is not None:
            continue
        by_variant.setdefault(job.variant, []).append(job)
    variants = [
        _variant(several, measured_costs["costs"][name]) | {"kv_dtype": formats.get(name)}
        for name, several in by_variant.items()
    ]
    by_name = {variant["variant"]: variant for variant in variants}
    unknown = {name: variant["runs"][0].get("unknown_characters", []) for name, variant in by_name.items()}
    replaced = overridden(preset, jobs)
    questions = []
    for question in preset.questions or _usual(preset, jobs):
        of = [name for name, several in by_variant.items() if several[0].of in question.of]
        if not of:
            continue
        of.sort(key=lambda name: question.of.index(by_variant[name][0].of))
        found = claims(by_name[of[0]], [by_name[name] for name in of[1:]])
        questions.append({"ask": question.ask, "of": of, "show": list(question.show), "claims": found})
    return {
        "study": preset.name,
        "about": f"{preset.about} ({replaced}.)" if replaced else preset.about,
        "command": shlex.join(command),
        "fraction": fraction,
        "temperature": preset.temperature,
        "prompt": preset.prompt,
        "prompt_note": prompt_note(preset.prompt, unknown),
        "environment": measured_costs["environment"],
        "variants": variants,
        "questions": questions,
        "conversion": _conversion(jobs),
        "exports": [_export(job) for job in jobs if job.export is not None],
    }


def _usual(preset: Preset, jobs: Sequence[Job]) -> tuple[Question, ...]:
    """Return the questions of a preset without any: all panels or, for one model, what its page does not show."""
    of = tuple(preset.variants)
    if one_source(jobs) is not None:
        speed = Question(ask="How fast does each decode?", of=of, show=("speed",))
        formats = Question(ask="Half the rank or half the bits?", of=of, show=("kv_dtype",))
        return (formats, speed) if preset.kv_dtype else (speed,)
    return (Question(ask="What does each cost, and what does it reach?", of=of, show=PANELS),)


def _conversion(jobs: Sequence[Job]) -> Record | None:
    """Return the source of all variants and its plan; None if there is no one source."""
    source = one_source(jobs)
    if source is None:
        return None
    config, dtype = read_plannable(source.model), plannable_dtype(source.model)
    planned = plan(config, source.options.data.block_size, dtype=dtype)
    return {
        "source": source.variant,
        "architecture": describe_model(source.model),
        "plan": asdict(planned),
    }


def _export(job: Job) -> Record:
    """Return how an export was made, and what it gave when it was read back."""
    assert job.parent is not None
    return {
        "variant": job.variant,
        "from": job.parent.variant,
        "seed": job.seed,
        "about": job.about,
        "folder": str(job.model),
        "command": job.command(),
        **measured(job)["read_back"],
    }


def describe_model(folder: Path) -> str:
    """Describe a model in a line: parameters, layers, width, attention."""
    config = read_plannable(folder)
    text = f"{parameters(config):,} parameters"
    if isinstance(config, GPTConfig):
        text += f", {config.n_layer} layers, {config.n_embd} wide, {config.attention[0].describe()}"
    return text


def _variant(jobs: Sequence[Job], costs: Record) -> Record:
    first = jobs[0]
    runs = [
        {
            "seed": job.seed,
            "folder": str(job.model),
            "command": job.command(),
            "steps": job.options.trainer.max_iters if job.is_trained else 0,
            **measured(job),
        }
        for job in jobs
    ]
    for run in runs:
        del run["of"]
    return {
        "variant": first.variant,
        "kind": first.kind,
        "about": first.about,
        "convert": first.convert,
        "from": None if first.parent is None else first.parent.variant,
        "steps_before": first.steps_before,
        "steps": first.steps_before + runs[0]["steps"],
        "length": first.length,
        "length_before": first.length if first.parent is None else first.parent.length,
        "on": _on(first),
        "batch_tokens": first.options.trainer.batch_size
        * first.options.trainer.grad_accumulation
        * first.options.data.block_size,
        "val_loss": mean_and_range([run["val_loss"] for run in runs]),
        "train_loss": mean_and_range([run["train_loss"] for run in runs]),
        "costs": costs,
        "runs": runs,
    }


def _on(job: Job) -> Record:
    """Return what a loss was measured on: the options of its text, its tokenizer, and the number of blocks."""
    text = asdict(job.options.data) | {"tokenizer": measured(job)["tokenizer"]}
    del text["block_size"]
    return {"text": text, "blocks": job.options.trainer.batch_size * job.options.trainer.eval_batches}


def mean_and_range(values: Sequence[float]) -> list[float]:
    """Return [mean, lowest, highest]."""
    return [sum(values) / len(values), min(values), max(values)]


def runs_csv(document: Record) -> str:
    """Return a CSV with one row per run: its losses, and its variant's costs."""
    rows = []
    for variant in document["variants"]:
        costs = {key: value for key, value in variant["costs"].items() if isinstance(value, int | float)}
        times = {key: value[0] for key, value in variant["costs"].items() if isinstance(value, list)}
        for run in variant["runs"]:
            rows.append(
                {
                    "variant": variant["variant"],
                    "kind": variant["kind"],
                    "seed": run["seed"],
                    "steps": run["steps"],
                    "train_loss": run["train_loss"],
                    "val_loss": run["val_loss"],
                    **costs,
                    **(variant["costs"]["memory"] or {}),
                    **times,
                    "folder": run["folder"],
                    "command": run["command"],
                }
            )
    return _csv(rows)


def curves_csv(document: Record) -> str:
    """Return a CSV with one row per evaluation: variant, seed, step, train_loss, val_loss."""
    return _csv(
        {
            "variant": variant["variant"],
            "seed": run["seed"],
            "step": step,
            "train_loss": train,
            "val_loss": val,
        }
        for variant in document["variants"]
        for run in variant["runs"]
        for step, train, val in run["curve"]
    )


def _csv(rows: Any) -> str:
    rows = list(rows)
    file = io.StringIO()
    writer = csv.DictWriter(
        file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return file.getvalue()


def _cell(value: Any) -> Any:
    """Return a value of a table; a text that a spreadsheet would compute gets an apostrophe before it."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")  # csv does not quote the former
    return f"'{text}" if value.startswith(FORMULA) else text
