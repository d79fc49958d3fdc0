"""Learning back what a conversion lost, from the model it was made of."""

import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rehead.checkpoint import read_at, read_config, resolve
from rehead.checkpoint.find import is_run
from rehead.config import ModelConfig, RunOptions, decode, flags
from rehead.conversion.blocks import TEST_TOKENS, blocks_of
from rehead.conversion.certificate import CERTIFICATE, Certificate, Text
from rehead.conversion.folder import require_apart
from rehead.conversion.page import PAGE, page
from rehead.conversion.texts import Passage
from rehead.data import Ids, shown
from rehead.errors import ConfigError, InvalidInput, UsageError
from rehead.measure.fidelity import compare
from rehead.model import LanguageModel

DEFAULTS = {
    "max_iters": 300,
    "learning_rate": 1e-4,
    "min_learning_rate": 0.0,
    "schedule": "cosine",
    "warmup_iters": 20,
    "weight_decay": 0.0,
    "sample_every": 0,
}


def heal_options(folder: Path, teacher: Path, changes: list[str]) -> RunOptions:
    """The run that heals the model in `folder`, with the user's flags on top.

    It reads the teacher's own text where the teacher is a run folder, in blocks of the model's length,
    and goes to FOLDER-healed.
    """
    if folder.resolve() == teacher.resolve():
        raise UsageError(
            f"--teacher {teacher} is the model to heal itself, from which nothing is to be learned: give the model "
            "it was converted from."
        )
    config, source = read_at(folder, read_config), read_at(teacher, read_config)
    _require_source(folder, source)
    table: dict[str, Any] = {
        "system": {"work_dir": f"{folder}-healed"},
        "model": {"folder": str(folder)},
        "trainer": {"teacher": str(teacher), **DEFAULTS},
    }
    named = any(flag.removeprefix("--").startswith(("data.path=", "data.name=")) for flag in changes)
    run = teacher / "config.yaml"
    if is_run(teacher) and not named:
        data = flags.read([], (run,)).data
        table["data"] = {"path": data.path, "name": data.name, "val_fraction": data.val_fraction}
    elif not named:
        raise ConfigError(f"{teacher} is no run folder, so it names no text to heal on. Give data.path=TEXT.")
    table.setdefault("data", {})["block_size"] = config.block_size
    options = flags.read(changes, tables=(table,))
    require_apart(folder, Path(options.system.work_dir))
    begun = Path(options.system.work_dir) / "config.yaml"
    if options.trainer.resume and begun.is_file():
        options = flags.read([f"trainer.teacher={teacher}", *changes], (begun,), (table,))
    return options


def _require_source(folder: Path, teacher: ModelConfig) -> None:
    """Refuse another teacher than the model the certificate says it came from."""
    place = resolve(folder)
    if not (place / CERTIFICATE).exists():
        warnings.warn(
            f"{folder} has no {CERTIFICATE}: it is trained to follow its teacher, without one", stacklevel=3
        )
    elif decode(ModelConfig, Certificate.read(place).source, str(place / CERTIFICATE)) != teacher:
        raise ConfigError(
            f"{folder} was not converted from such a model as the teacher: see its {PAGE}. Give that one."
        )


def require_same_vocabulary(model: LanguageModel, teacher: LanguageModel, place: str) -> None:
    """Refuse a teacher that speaks of other tokens or cannot read as far."""
    sizes = model.config.vocab_size, teacher.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"trainer.teacher={place} has vocab_size={sizes[1]}, the model {sizes[0]}: a teacher predicts the same "
            "tokens. Give the model this one was converted from."
        )
    limits = model.config.block_size, teacher.config.block_size
    if limits[0] > limits[1]:
        raise ConfigError(
            f"trainer.teacher={place} reads {limits[1]} tokens, the model {limits[0]}. Give another."
        )


def healed_files(
    options: RunOptions, model: LanguageModel, teacher: LanguageModel, step: int, held_out: Ids
) -> dict[str, str]:
    """The certificate of the converted model, measured anew against its teacher; none where it has none."""
    assert options.model.folder is not None
    try:
        before = read_at(Path(options.model.folder), Certificate.read)
    except InvalidInput:
        return {}
    test = Text.of(Passage(name="validation part of the run's text", ids=held_out), TEST_TOKENS)
    blocks = blocks_of(model, held_out, TEST_TOKENS, before.length)
    logits = asdict(compare(teacher, model, shown(blocks, "comparing with the teacher")))
    losses = list(logits.pop("losses"))
    alike = before.test is not None and before.test.sha256 == test.sha256
    entry = {
        "steps": step,
        "teacher": options.trainer.teacher,
        "distillation": options.trainer.distillation,
        "learning_rate": options.trainer.learning_rate,
        "batch_tokens": options.trainer.batch_size
        * options.trainer.grad_accumulation
        * options.data.block_size,
        "kl": [before.logits["kl"] if alike else None, logits["kl"]],
        "loss": [before.loss[1] if alike and before.loss else None, losses[1]],
    }
    after = replace(
        before,
        logits=logits,
        loss=losses,
        test=test,
        held_out=True,
        exact=False,
        compared_on="text",
        healing=[*before.healing, entry],
    )
    return {CERTIFICATE: after.to_json(), PAGE: page(after)}
