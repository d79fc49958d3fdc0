"""Runs one job: makes the model, measures it and writes the results, skipping what is done."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from rehead import checkpoint
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.export.folder import export_folder
from rehead.data import Batch, Ids, Split, evaluation_blocks, shown, split
from rehead.data.files import write_whole
from rehead.data.hold import hold
from rehead.data.tokens import read_ids
from rehead.generation import stream
from rehead.measure import evaluate
from rehead.model import LanguageModel
from rehead.stages import staged
from rehead.study.begun import note, read
from rehead.study.job import Job
from rehead.study.metrics import read_metrics
from rehead.study.preset import Preset
from rehead.study.prompt import unknown_characters
from rehead.study.readback import read_back
from rehead.study.sharing import Sharing
from rehead.system.device import choose_device
from rehead.tokenizer import Tokenizer, load_tokenizer
from rehead.training import train
from rehead.training.folder import RunFolder
from rehead.training.run import PROMPT_TOKENS
from rehead.training.start import read_text

Record = dict[str, Any]
MEASURED = "measured.json"
FORMAT = 4
"""Format of measured.json; a file of another format is measured again."""


def is_done(job: Job, preset: Preset) -> bool:
    """Return True if `run_job` has nothing left to do."""
    results = read(job.folder / MEASURED)
    return (
        results is not None
        and results.get("of") == _subject(job, preset)
        and (job.kind == "given" or job.model.exists())
    )


def measured(job: Job) -> Record:
    """Return the results of `run_job`."""
    results = read(job.folder / MEASURED)
    assert results is not None
    return results


def run_job(job: Job, preset: Preset, sharing: Sharing) -> Iterator[Record]:
    """Train, convert, heal or export, then measure; yields the records of training between two of its own.

    Interrupted training resumes from its last checkpoint; finished models are not made again.
    """
    if is_done(job, preset):
        return
    yield {"event": "begin"}
    if job.is_trained:
        resume = RunFolder(job.folder).begun
        for record in train(replace(job.options, trainer=replace(job.options.trainer, resume=resume))):
            if record.get("event") == "start":  # not earlier: a refused run leaves nothing behind
                note(job)
            yield record
        yield {"event": "measured", "found": _results(job, preset)}
        return
    with hold(job.folder, lambda: True, "system.work_dir"):
        note(job)
        if job.kind != "given" and not job.model.exists():
            _make(job, sharing)
        yield {"event": "measured", "found": _results(job, preset)}


def _results(job: Job, preset: Preset) -> Record:
    """Measure the model of a job, and write what is found."""
    results = {"of": _subject(job, preset), **_measure(job, preset)}
    write_whole(job.folder / MEASURED, [json.dumps(results).encode()])
    return results


def _make(job: Job, sharing: Sharing) -> None:
    """Convert or export the model of the parent."""
    assert job.parent is not None
    if job.export is not None:
        export_folder(
            job.parent.model, job.model, job.export.get("format", "auto"), engine=job.export.get("for")
        )
    else:
        sharing.convert(job)


def load(job: Job) -> LanguageModel:
    """Load the model of a job, on the device that trains it."""
    return checkpoint.load(job.model, device=choose_device(job.options.trainer.device))


def _subject(job: Job, preset: Preset) -> Record:
    """Return everything that the results depend on."""
    return {
        "format": FORMAT,
        "job": job.description(),
        "prompt": preset.prompt,
        "new_tokens": preset.new_tokens,
        "temperature": preset.temperature,
    }


def _measure(job: Job, preset: Preset) -> Record:
    if job.export is not None and job.parent is not None:
        return {"read_back": read_back(load(job.parent), job.model, texts_of(job)[0].val)}
    model = load(job)
    texts, tokenizer = texts_of(job)
    bos = tokenizer.bos
    metrics = read_metrics(job.folder / "metrics.jsonl")
    own = job.length
    losses = metrics.losses[-1][1:] if metrics.losses else _losses(job, model, texts, own, bos)
    shorter = {length: _losses(job, model, texts, length, bos)[1] for length in job.lengths if length != own}
    return {
        "train_loss": losses[0],
        "val_loss": losses[1],
        "val_loss_at": {str(length): loss for length, loss in {**shorter, own: losses[1]}.items()},
        "curve": [(step + job.steps_before, *both) for step, *both in metrics.losses],
        "seconds_per_step": metrics.seconds_per_step,
        "torn_lines": metrics.torn,
        "sample": _sample(model, tokenizer, preset, texts, bos),
        "unknown_characters": unknown_characters(tokenizer, preset.prompt or ""),
        "tokenizer": hashlib.sha256(tokenizer.to_json().encode()).hexdigest(),
        "certificate": _certificate(job),
    }


def texts_of(job: Job) -> tuple[Split, Tokenizer]:
    """Return the text of a job and its tokenizer. What a run was trained on stays, whatever became of the file."""
    store, data = RunFolder(job.folder).tokens, job.options.data
    if store.exists():
        tokenizer = load_tokenizer(job.model)
        ids = read_ids(store, tokenizer)
    else:
        tokenizer, tokens = read_text(job.options, store, checkpoint.resolve(job.model))
        ids = tokens.ids
    return split(ids, data.block_size, data.val_fraction), tokenizer


def _losses(job: Job, model: LanguageModel, texts: Split, size: int, bos: int | None) -> tuple[float, float]:
    """Return train and validation loss as training at this block size evaluates them, on the same blocks."""
    train_loss, val_loss = (
        evaluate(model, shown(_blocks(job, ids, size, bos), f"evaluating on {part} in blocks of {size:,}"))[0]
        for part, ids in zip(("training text", "validation text"), texts, strict=True)
    )
    return train_loss, val_loss


def validation_blocks(job: Job) -> Iterator[Batch]:
    """Return the blocks of the validation text on which a job's loss is measured."""
    texts, tokenizer = texts_of(job)
    return _blocks(job, texts.val, job.length, tokenizer.bos)


def _blocks(job: Job, ids: Ids, size: int, bos: int | None) -> Iterator[Batch]:
    trainer = job.options.trainer
    limit = trainer.batch_size * trainer.eval_batches
    return evaluation_blocks(ids, size, trainer.batch_size, limit, bos=bos)


def _sample(model: LanguageModel, tokenizer: Tokenizer, preset: Preset, texts: Split, bos: int | None) -> str:
    """Continue the preset's prompt; without one, or if it cannot be encoded, the beginning of the validation text.

    If these are more tokens than the model reads, only the first ones are continued.
    """
    prompt = [int(token) for token in texts.val[:PROMPT_TOKENS]]
    if preset.prompt is not None and not unknown_characters(tokenizer, preset.prompt):
        prompt = tokenizer.encode(preset.prompt).tolist()
    begin = [] if bos is None else [bos]
    begun = [*begin, *prompt][: model.config.context_limit]
    tokens = stream(model, [torch.tensor(begun)], preset.new_tokens, preset.temperature, seed=0)
    tokens = staged(tokens, "writing a sample", preset.new_tokens, "tokens")
    return tokenizer.decode([*begun[len(begin) :], *(int(token) for token in tokens)])


def _certificate(job: Job) -> Record | None:
    """Return the certificate of a converted or healed model, with its path as `file`; None for others."""
    if job.kind not in ("converted", "healed"):
        return None
    place = checkpoint.resolve(job.model)
    certificate = asdict(Certificate.read(place))
    for key in ("format", "source", "result", "environment"):
        del certificate[key]
    return certificate | {"kl": certificate["logits"]["kl"], "file": str(place / CERTIFICATE)}
