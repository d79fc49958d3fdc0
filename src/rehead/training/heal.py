"""Healing: training a converted model to predict as the model it was converted from."""

import hashlib
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rehead.checkpoint import read_at, read_config, resolve
from rehead.checkpoint.find import run_data
from rehead.checkpoint.hub import pinned
from rehead.config import DataOptions, GPTConfig, ModelConfig, RunOptions, TrainerOptions, decode, flags
from rehead.conversion.arguments import require_apart
from rehead.conversion.blocks import TEST_TOKENS, blocks_of
from rehead.conversion.certificate import CERTIFICATE, Certificate, Text
from rehead.conversion.events import Healing
from rehead.conversion.history import conversion_of
from rehead.conversion.page import PAGE, page
from rehead.conversion.texts import Passage
from rehead.data import Ids, read_ids, shown, source_of, split
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.measure import kv_bytes_per_token
from rehead.measure.environment import environment
from rehead.measure.fidelity import compare
from rehead.measure.forecast import step_bytes
from rehead.measure.length import text_length
from rehead.model import LanguageModel
from rehead.system.machine import available_memory
from rehead.system.torchrun import of_torchrun
from rehead.tokenizer import Tokenizer, load_tokenizer
from rehead.training import state
from rehead.training.folder import RunFolder
from rehead.training.seen import is_held_out, warn_unless_held_out

DEFAULTS = {
    "max_iters": 300,
    "learning_rate": 1e-4,
    "min_learning_rate": 0.0,
    "schedule": "cosine",
    "warmup_iters": 20,
    "weight_decay": 0.0,
    "sample_every": 0,
}


STEP_TOKENS, STEP_BYTES = 16_384, 2**32
"""Most tokens, and most bytes of activations, in a step if no batch size is given: long blocks, small batches."""


def healed_folder(folder: Path) -> Path:
    """Return the folder of the run that heals the model in `folder`, unless a flag names another."""
    return Path(f"{folder}-healed")


def heal_options(folder: Path, teacher: Path, changes: list[str], length: int | None = None) -> RunOptions:
    """Return the options of the run that heals the model in `folder`, with the user's flags on top.

    If the teacher is a run folder, healing reads the teacher's text. Blocks have `length` tokens, by default as in
    `text_length`. The new run is written to FOLDER-healed unless a flag names another folder.
    """
    if folder.resolve() == teacher.resolve():
        raise UsageError(
            f"--teacher {teacher} is the model that is healed: give the model it was converted from."
        )
    config, source = read_at(folder, read_config), read_at(teacher, read_config)
    _require_source(folder, source)
    table: dict[str, Any] = {
        "system": {"work_dir": str(healed_folder(folder))},
        "model": {"folder": str(folder)},
        "trainer": {"teacher": str(teacher), **DEFAULTS},
    }
    names_text = any(flag.removeprefix("--").startswith(("data.path=", "data.name=")) for flag in changes)
    data = run_data(teacher)
    if data is not None and not names_text:
        table["data"] = {"path": data.path, "name": data.name, "val_fraction": data.val_fraction}
    elif not names_text:
        raise ConfigError(
            f"{teacher} is not a run folder, so it does not name a text to heal on. Give data.path=TEXT."
        )
    usual = text_length(config, length, teacher)
    table.setdefault("data", {})["block_size"] = usual
    if length is not None:
        changes = [*changes, f"data.block_size={length}"]
    asked = flags.read(changes, tables=(table,)).data.block_size
    table["trainer"] |= _usual_batch(config, max(1, asked))
    options = flags.read(changes, tables=(table,))
    require_apart(folder, Path(options.system.work_dir))
    begun = Path(options.system.work_dir) / "config.yaml"
    if options.trainer.resume and begun.is_file():
        given = [f"trainer.teacher={teacher}", *changes]
        options = flags.read(given, (begun,), (table,)).at(options.system.work_dir)
    elif data is not None and not names_text:
        _require_its_text(teacher, data)
    return options


def _usual_batch(config: ModelConfig, length: int) -> dict[str, Any]:
    """Return `batch_size` and `recompute` for blocks of `length`, where a user gives none.

    Processes of torchrun share the batch equally, and must all choose the same one, also after a restart: so the memory
    that one of them finds free does not matter.
    """
    job = of_torchrun()
    world, free = (1, available_memory()) if job is None else (job.world, 4 * STEP_BYTES)
    rows = max(1, min(TrainerOptions.batch_size, STEP_TOKENS // length) // world)
    if not isinstance(config, GPTConfig) or step_bytes(config, rows, length) <= min(STEP_BYTES, free // 2):
        return {"batch_size": rows * world}
    one = step_bytes(config, 1, length, recompute=True)
    rows = max(1, min(rows, min(STEP_BYTES, free // 4) // one))
    return {"batch_size": rows * world, "recompute": True}


def _require_its_text(teacher: Path, data: DataOptions) -> None:
    """Refuse a text that the teacher was not trained on: its config.yaml, in no manifest, could name any file."""
    trained = state.read_numbers(resolve(teacher))["text_sha256"]
    digest = hashlib.sha256()
    for chunk in source_of(data):
        digest.update(chunk.encode())
    if digest.hexdigest() != trained:
        raise ConfigError(
            f"{teacher}/config.yaml names {data.path or data.name or 'no text'}, another text than "
            "the one it was trained on. Name the text to heal on: data.path=TEXT."
        )


def _require_source(folder: Path, teacher: ModelConfig) -> None:
    """Raise ConfigError unless the teacher is the source named in the certificate."""
    place = resolve(folder)
    if not (place / CERTIFICATE).exists():
        warnings.warn(
            f"{folder} has no {CERTIFICATE}: it is trained without checking that it came from the teacher",
            stacklevel=3,
        )
    elif decode(ModelConfig, Certificate.read(place).source, str(place / CERTIFICATE)) != teacher:
        raise ConfigError(
            f"{folder} was converted from another model than the teacher. Give the source named in its {PAGE}."
        )


def require_same_vocabulary(model: LanguageModel, teacher: LanguageModel, place: str) -> None:
    """Raise ConfigError for a teacher with a vocabulary of another size or a shorter context."""
    sizes = model.config.vocab_size, teacher.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"trainer.teacher={place} has vocab_size={sizes[1]}, the model {sizes[0]}: both must have the same "
            "tokens. Give the model this one was converted from."
        )
    limits = model.config.block_size, teacher.config.block_size
    if limits[0] > limits[1]:
        raise ConfigError(
            f"trainer.teacher={place} reads {limits[1]} tokens, the model {limits[0]}. Give one with a longer context."
        )


def require_same_tokens(tokenizer: Tokenizer, place: str) -> None:
    """Raise ConfigError for a teacher whose folder has another tokenizer, whose ids mean other tokens."""
    try:
        theirs = load_tokenizer(place)
    except InvalidInput:
        return
    if any(tokenizer.token(id) != theirs.token(id) for id in range(tokenizer.vocab_size)):
        raise ConfigError(
            f"trainer.teacher={place} has another tokenizer than the model: both must have the same tokens. Give the "
            "model this one was converted from, or train with its tokenizer (model.pretrained_folder)."
        )


def require_its_tokenizer(tokenizer: Tokenizer, data: DataOptions, place: str) -> None:
    """Raise ConfigError for options that describe another tokenizer than the model's in `place`, which is used."""
    kind, size = tokenizer.kind, tokenizer.vocab_size
    if data.tokenizer in (DataOptions.tokenizer, kind) and (
        data.vocab_size is None or data.vocab_size >= size
    ):
        return
    asked = f"data.tokenizer={data.tokenizer}"
    if data.vocab_size is not None:
        asked += f", data.vocab_size={data.vocab_size}"
    raise ConfigError(
        f"{asked}: a run that starts from {place} reads its text with the tokenizer there ({kind}, "
        f"vocab_size={size}). Leave data.tokenizer and data.vocab_size out."
    )


def certificate_of(options: RunOptions, model: LanguageModel) -> Certificate | None:
    """Return the certificate of the model to heal; None if it was not converted or there is no validation text.

    Raises InvalidInput, before the first step, if the healed model could not be measured as the certificate was.
    """
    if options.model.folder is None or options.trainer.teacher is None:
        return None
    path = Path(options.model.folder)
    try:
        resolve(path)
    except InvalidInput:  # a run may be resumed after the folder it began with is gone
        return None
    certificate = read_at(path, conversion_of)
    if certificate is not None and not options.data.val_fraction:
        warnings.warn(
            f"data.val_fraction=0 leaves no text to measure the healed model on: it gets no {CERTIFICATE}. Use 0.1 for "
            "one",
            stacklevel=2,
        )
        return None
    if certificate is not None and not 1 <= certificate.length <= model.config.block_size:
        raise InvalidInput(
            f"{path}: its {CERTIFICATE} was measured on texts of length={certificate.length}, the model reads 1 to "
            f"{model.config.block_size} tokens. Convert the model again."
        )
    job = of_torchrun()
    if certificate is not None and (job is None or job.rank == 0):  # who gives the tokens their final name
        _warn_of_fitted(certificate, options, load_tokenizer(options.model.folder))
    return certificate


def _warn_of_fitted(certificate: Certificate, options: RunOptions, tokenizer: Tokenizer) -> None:
    """Warn of a run about to begin if its validation text is not held out of the conversion."""
    ids = read_ids(RunFolder(Path(options.system.work_dir)).read_tokens, tokenizer)
    parts = split(ids, options.data.block_size, options.data.val_fraction)
    warn_unless_held_out(certificate, ids, parts.val)


def measured_again(
    certificate: Certificate,
    teacher: LanguageModel,
    model: LanguageModel,
    text: Ids,
    part: Passage,
    tokenizer: Tokenizer,
) -> Certificate:
    """Return a certificate with the losses and logits of a trained model against its teacher.

    It is measured on `part`, the end of a text of which the rest is trained on; its name says so if the conversion was
    fitted to it. The sizes are those in the number format of the trained model.
    """
    held_out = is_held_out(certificate, text, part.ids)
    if not held_out:
        part = replace(part, name=f"{part.name}, which the conversion was fitted to")
    blocks = blocks_of(model, part.ids, TEST_TOKENS, certificate.length, part.bos)
    logits = asdict(compare(teacher, model, shown(blocks, "comparing with the teacher")))
    loss = list(logits.pop("losses"))
    test = Text.of(part, TEST_TOKENS, certificate.length).decoded(part.ids, tokenizer)
    dtype = model.head.weight.dtype
    return replace(
        certificate,
        logits=logits,
        loss=loss,
        kv_bytes_per_token=[kv_bytes_per_token(one.config, dtype) for one in (teacher, model)],
        dtype=str(dtype).removeprefix("torch."),
        test=test,
        held_out=held_out,
        exact=False,
        compared_on="text",
        environment=environment(model.device),
    )


def healed_files(
    before: Certificate,
    options: RunOptions,
    model: LanguageModel,
    teacher: LanguageModel,
    step: int,
    held_out: Ids,
    tokenizer: Tokenizer,
) -> dict[str, str]:
    """Return the certificate `before`, measured again against the teacher, as files by name."""
    text = read_ids(RunFolder(Path(options.system.work_dir)).tokens, tokenizer)
    part = Passage(name="the validation part of the run's text", ids=held_out, bos=tokenizer.bos)
    after = measured_again(before, teacher, model, text, part, tokenizer)
    assert after.test is not None
    assert after.loss is not None
    alike = before.test is not None and before.test.sha256 == after.test.sha256
    place = str(options.trainer.teacher)
    entry = Healing(
        steps=step,
        teacher=place if pinned(place) else Path(place).absolute().name,
        distillation=options.trainer.distillation,
        train=options.trainer.train,
        learning_rate=options.trainer.learning_rate,
        batch_tokens=options.trainer.batch_size * options.trainer.grad_accumulation * options.data.block_size,
        kl=[before.logits["kl"] if alike else None, after.logits["kl"]],
        loss=[before.loss[1] if alike and before.loss else None, after.loss[1]],
    )
    after = replace(after, healing=[*before.healing, entry])
    return {CERTIFICATE: after.to_json(), PAGE: page(after)}
