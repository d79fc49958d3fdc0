"""One job: make the model, measure it, and write down what was found, each unless it is done."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch

from rehead import checkpoint
from rehead.conversion.certificate import CERTIFICATE, Certificate
from rehead.conversion.export.folder import export_folder
from rehead.data import Split, evaluation_blocks, shown, split
from rehead.data.files import write_whole
from rehead.errors import InvalidInput
from rehead.generation import stream
from rehead.measure import evaluate
from rehead.model import LanguageModel
from rehead.stages import staged
from rehead.study.begun import note, read
from rehead.study.job import Job
from rehead.study.metrics import read_metrics
from rehead.study.preset import Preset
from rehead.study.readback import read_back
from rehead.study.sharing import Sharing
from rehead.system.device import choose_device
from rehead.tokenizer import Tokenizer, open_model
from rehead.training import train
from rehead.training.folder import RunFolder
from rehead.training.run import PROMPT_TOKENS
from rehead.training.start import read_text

Record = dict[str, Any]
MEASURED = "measured.json"
FORMAT = 3
"""Of measured.json; one of another format is measured again."""


def is_done(job: Job, preset: Preset) -> bool:
    """Whether `work` has nothing left to do."""
    found = read(job.folder / MEASURED)
    return found is not None and found["of"] == _asked(job, preset)


def measured(job: Job) -> Record:
    """What `work` found."""
    found = read(job.folder / MEASURED)
    assert found is not None
    return found


def work(job: Job, preset: Preset, sharing: Sharing) -> Iterator[Record]:
    """Train, convert, heal or export, then measure; yields the records of a training between two of its own.

    A training that was stopped goes on from its last checkpoint, what is whole is not made again.
    """
    if is_done(job, preset):
        return
    yield {"event": "begin"}
    if job.is_trained:
        resume = RunFolder(job.folder).begun
        for record in train(replace(job.options, trainer=replace(job.options.trainer, resume=resume))):
            if record.get("event") == "start":  # a run that is refused leaves nothing, this neither
                note(job)
            yield record
    else:
        note(job)
        if job.kind != "given" and not job.model.exists():
            _make(job, sharing)
    found = {"of": _asked(job, preset), **_measure(job, preset)}
    write_whole(job.folder / MEASURED, [json.dumps(found).encode()])
    yield {"event": "measured", "found": found}


def _make(job: Job, sharing: Sharing) -> None:
    """Convert or export what it starts from."""
    assert job.parent is not None
    if job.export is not None:
        export_folder(
            job.parent.model, job.model, job.export.get("format", "auto"), engine=job.export.get("for")
        )
    else:
        sharing.convert(job)


def load(job: Job) -> LanguageModel:
    """The model of a job, where it would be trained."""
    return checkpoint.load(job.model, device=choose_device(job.options.trainer.device))


def _asked(job: Job, preset: Preset) -> Record:
    return {
        "format": FORMAT,
        "job": job.description(),
        "prompt": preset.prompt,
        "new_tokens": preset.new_tokens,
        "temperature": preset.temperature,
    }


def _measure(job: Job, preset: Preset) -> Record:
    if job.export is not None and job.parent is not None:
        return {"read_back": read_back(load(job.parent), job.model, _texts(job).val)}
    opened = open_model(job.model, device=choose_device(job.options.trainer.device))
    model = opened.model
    texts = _texts(job)
    found = read_metrics(job.folder / "metrics.jsonl")
    own = job.length
    losses = found.losses[-1][1:] if found.losses else _losses(job, model, texts, own)
    shorter = {length: _losses(job, model, texts, length)[1] for length in job.lengths if length != own}
    return {
        "train_loss": losses[0],
        "val_loss": losses[1],
        "val_loss_at": {str(length): loss for length, loss in {**shorter, own: losses[1]}.items()},
        "curve": [(step + job.steps_before, *both) for step, *both in found.losses],
        "seconds_per_step": found.seconds_per_step,
        "torn_lines": found.torn,
        "sample": _sample(model, opened.require_tokenizer(), preset, texts),
        "certificate": _certificate(job),
    }


def _texts(job: Job) -> Split:
    _, tokens = read_text(job.options, RunFolder(job.folder).tokens, checkpoint.resolve(job.model))
    return split(tokens.ids, job.options.data.block_size, job.options.data.val_fraction)


def _losses(job: Job, model: LanguageModel, texts: Split, size: int) -> tuple[float, float]:
    """As a training at this block size evaluates, on the same blocks."""
    trainer = job.options.trainer
    train_loss, val_loss = (
        evaluate(
            model,
            shown(
                evaluation_blocks(ids, size, trainer.batch_size, trainer.batch_size * trainer.eval_batches),
                f"evaluating on {part} in blocks of {size:,}",
            ),
        )[0]
        for part, ids in zip(("what is trained on", "what is held out"), texts, strict=True)
    )
    return train_loss, val_loss


def _sample(model: LanguageModel, tokenizer: Tokenizer, preset: Preset, texts: Split) -> str:
    """What follows the preset's prompt or, where the text has other letters, the validation text's beginning."""
    prompt = [int(token) for token in texts.val[:PROMPT_TOKENS]]
    if preset.prompt is not None:
        with suppress(InvalidInput):
            prompt = tokenizer.encode(preset.prompt).tolist()
    tokens = stream(model, [torch.tensor(prompt)], preset.new_tokens, preset.temperature, seed=0)
    tokens = staged(tokens, "writing a sample", preset.new_tokens, "tokens")
    return tokenizer.decode([*prompt, *(int(token) for token in tokens)])


def _certificate(job: Job) -> Record | None:
    """What the certificate of a conversion, or of its healing, says; `file` is where it lies."""
    if job.kind not in ("converted", "healed"):
        return None
    place = checkpoint.resolve(job.model)
    found = asdict(Certificate.read(place))
    for key in ("format", "source", "result", "environment"):
        del found[key]
    return found | {"kl": found["logits"]["kl"], "file": str(place / CERTIFICATE)}
