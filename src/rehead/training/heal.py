"""Healing: training a converted model to predict as the model it was converted from."""

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any

from rehead.checkpoint import read_at, read_config, resolve
from rehead.checkpoint.find import run_data
from rehead.checkpoint.hub import pinned
from rehead.config import (
    DataOptions,
    GPTConfig,
    ModelConfig,
    RunOptions,
    TrainerOptions,
    decode,
    flags,
)
from rehead.config.differing import DROPOUT, differing
from rehead.conversion.arguments import require_apart
from rehead.conversion.certificate import CERTIFICATE
from rehead.conversion.history import conversion_of, is_source
from rehead.conversion.page import PAGE
from rehead.data import source_of
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.measure.forecast import step_bytes
from rehead.measure.length import text_length
from rehead.model import LanguageModel
from rehead.system.machine import available_memory
from rehead.system.torchrun import of_torchrun
from rehead.tokenizer import Tokenizer, load_tokenizer
from rehead.training import state

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
    for key, known in (("trainer.teacher", f"--teacher {teacher}"), ("model.folder", str(folder))):
        if _gives(changes, key):
            raise UsageError(f"{key}: the command has {known} already. Leave the flag out.")
    config, source = read_at(folder, read_config), read_at(teacher, read_config)
    _require_source(folder, config, teacher, source)
    table: dict[str, Any] = {
        "system": {"work_dir": str(healed_folder(folder))},
        "model": {"folder": str(folder)},
        "trainer": {"teacher": str(teacher), **DEFAULTS},
    }
    asked, names_text = flags.read(changes, tables=(table,)), _gives(changes, "data.path", "data.name")
    begun, data = Path(asked.system.work_dir) / "config.yaml", run_data(teacher)
    resumes = asked.trainer.resume and begun.is_file()
    if data is not None and not names_text:
        table["data"] = {"path": data.path, "name": data.name, "val_fraction": data.val_fraction}
    elif not names_text and not resumes:
        raise ConfigError(
            f"{teacher} is not a run folder, so it does not name a text to heal on. Give data.path=TEXT."
        )
    usual = text_length(config, length, teacher)
    table.setdefault("data", {})["block_size"] = usual
    if length is not None:
        changes = [*changes, f"data.block_size={length}"]
    asked = flags.read(changes, tables=(table,))
    table["trainer"] |= _usual_batch(
        config,
        max(1, asked.data.block_size),
        asked.trainer.batch_size if _gives(changes, "trainer.batch_size") else None,
        compiled=asked.trainer.compile,
    )
    options = flags.read(changes, tables=(table,))
    require_apart(folder, Path(options.system.work_dir))
    if resumes:
        given = [f"trainer.teacher={teacher}", *changes]
        options = flags.read(given, (begun,), (table,)).at(options.system.work_dir)
        _require_its_model(folder, options)
    elif data is not None and not names_text:
        _require_its_text(teacher, data)
    return options


def _gives(changes: list[str], *keys: str) -> bool:
    """Return whether a flag gives one of these options."""
    return any(flag.removeprefix("--").partition("=")[0] in keys for flag in changes)


def _require_its_model(folder: Path, options: RunOptions) -> None:
    """Raise ConfigError if the run to resume heals another model than that in `folder`, or what it was taught."""
    healed, place = options.model.folder, options.system.work_dir
    if healed is None or not (os.path.exists(healed) or pinned(healed)):
        return
    known = (str(folder), f"{folder}-taught", f"{place}-taught")
    if os.path.realpath(healed) not in map(os.path.realpath, known):
        raise ConfigError(
            f"the run in {place} heals {healed}, not {folder}: give that model, or another system.work_dir."
        )


def _usual_batch(
    config: ModelConfig, length: int, rows: int | None = None, *, compiled: bool = False
) -> dict[str, Any]:
    """Return `batch_size` and `recompute` for blocks of `length`, where a user gives none; `rows` are a given batch.

    What is `compiled` is not recomputed. Processes of torchrun share the batch equally, and must all choose the same
    one, also after a restart: so the memory that one of them finds free does not matter.
    """
    job = of_torchrun()
    world, free = (1, available_memory()) if job is None else (job.world, 4 * STEP_BYTES)
    rows = max(1, (rows or min(TrainerOptions.batch_size, STEP_TOKENS // length)) // world)
    if not isinstance(config, GPTConfig) or step_bytes(config, rows, length) <= min(STEP_BYTES, free // 2):
        return {"batch_size": rows * world}
    one = step_bytes(config, 1, length, recompute=not compiled)
    rows = max(1, min(rows, min(STEP_BYTES, free // 4) // one))
    return {"batch_size": rows * world, "recompute": not compiled}


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


def _require_source(folder: Path, config: ModelConfig, place: Path, teacher: ModelConfig) -> None:
    """Raise ConfigError unless the teacher, at `place`, is the source named in the certificate."""
    certificate = conversion_of(resolve(folder))
    if certificate is None:
        swapped = conversion_of(resolve(place))
        if swapped is not None and is_source(config, swapped):
            raise ConfigError(
                f"{place} was converted from a model like {folder}, not {folder} from {place}: swap them, "
                f"rehead heal {place} --teacher {folder}"
            )
        warnings.warn(
            f"{folder} has no {CERTIFICATE}: it is trained without checking that it came from the teacher",
            stacklevel=3,
        )
    elif not is_source(teacher, certificate):
        source = decode(ModelConfig, certificate.source, CERTIFICATE)
        name, (ours, theirs) = next(iter(differing(source, teacher, DROPOUT).items()))
        where = f" The sha256 of its weights is in {PAGE}." if certificate.source_sha256 else ""
        raise ConfigError(
            f"{folder} was converted from another model than the teacher, one with {name}={ours!s:.60} "
            f"where the teacher has {theirs!s:.60}: give that model.{where}"
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
