"""Refuses jobs that would fail, before anything is trained."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

from rehead.checkpoint import families
from rehead.checkpoint.find import is_run
from rehead.config import GPTConfig, ModelConfig
from rehead.config.differing import DROPOUT
from rehead.conversion import methods
from rehead.conversion.arguments import require_passes, require_text
from rehead.conversion.export.engines import Engine
from rehead.conversion.export.fit import Asked, require_fit
from rehead.conversion.folder import read_plannable, require_convertible
from rehead.conversion.measured import require_measurable, require_measured_on
from rehead.conversion.texts import SELF
from rehead.data import CORPORA
from rehead.errors import ConfigError
from rehead.study.job import Job, written
from rehead.study.preset import Flags


def check(job: Job) -> None:
    """Raise ConfigError for a job that would fail."""
    options = job.options
    if not options.data.val_fraction:
        raise ConfigError("data.val_fraction=0 leaves a study without a loss to compare. Use 0.1.")
    if options.data.block_size < 2:
        raise ConfigError("data.block_size=1 leaves nothing to decode. Use 2 or more.")
    if options.trainer.parallel != "none":
        raise ConfigError(
            f"trainer.parallel={options.trainer.parallel}: a study trains each model in one process, several at "
            "once with --jobs. Leave it out."
        )
    if job.convert is not None:
        _require_conversion(job)
    elif job.export is not None:
        _require_export(job, job.export)
    elif job.follows_flags:
        config_of(job)
        if job.parent is not None:
            _require_same_shape(job, job.parent)
    else:
        options.model.require_folder_only()
        _require_room(job)


def _require_conversion(job: Job) -> None:
    """Raise ConfigError for an unknown method, a text that is not there, and a target that the model cannot have.

    Raises UsageError for ranks that cannot be measured, and for teaching what is exact.
    """
    method = (job.convert or {}).get("method")
    if method not in (None, *methods()):
        raise ConfigError(f"method={method!r} is unknown. Use one of {', '.join(methods())}.")
    for text in [*job.reading.get("calibration", ()), *filter(None, [job.reading.get("test")])]:
        if text != SELF and text not in CORPORA and not Path(text).exists():
            raise ConfigError(f"convert: no text at {text!r}. Give a file or folder that exists.")
    measured, teach = job.fitting.get("measured_ranks", False), job.fitting.get("teach", 0)
    assert job.parent is not None
    has_text = "calibration" in job.reading or job.parent.is_trained or is_run(job.parent.model)
    require_passes(teach)
    require_text(teach, has_text)
    if measured:
        require_measurable(job.target, None)
        require_measured_on(has_text)
    config = config_of(job.parent)
    if isinstance(config, GPTConfig):
        require_convertible(config, job.target, method, measured=measured, teach=teach)


def _require_export(job: Job, export: Flags) -> None:
    """Raise ConfigError for an unknown format or engine, and for one that the model does not fit."""
    for key, known in (("format", ("auto", *families)), ("for", get_args(Engine))):
        if export.get(key, known[0]) not in known:
            raise ConfigError(f"export: {key}={export[key]!r}. Use one of {', '.join(known)}.")
    config = config_of(job.parent)
    if isinstance(config, GPTConfig):
        require_fit(config, Asked.of(export.get("format", "auto"), export.get("for")))


def _require_same_shape(job: Job, parent: Job) -> None:
    """Raise ConfigError for a job that cannot start from the weights of its parent."""
    if job.length < parent.length:
        raise ConfigError(
            f"data.block_size={job.length} is below the {parent.length} of {parent.variant}, which it continues. Use "
            f"{parent.length} or more."
        )
    before = parent.options.model
    model = replace(job.options.model, **{name: getattr(before, name) for name in DROPOUT})
    if model.resolve(1, 1) != before.resolve(1, 1):
        changed = [
            f"{key}={written(value)}"
            for key, value in job.flags.items()
            if key.startswith("model.") and parent.flags.get(key) != value
        ]
        raise ConfigError(
            f"{', '.join(changed)}: not the model of {parent.variant}, whose weights it starts from. Leave it out, or "
            "convert the model in another variant."
        )


def _require_room(job: Job) -> None:
    """Raise ConfigError for longer blocks than the model in a folder reads, be it the job's or what it came from."""
    root = job
    while (config := config_of(root)) is None and root.parent is not None:
        root = root.parent
    if config is not None and job.length > config.block_size:
        raise ConfigError(
            f"data.block_size={job.length}: the model in {root.options.model.folder or root.folder} reads at most "
            f"{config.block_size} tokens at once. Use 1 to {config.block_size}."
        )


def config_of(job: Job | None) -> ModelConfig | None:
    """Return the config of a job's model if it is known now; the vocabulary size may be a placeholder."""
    if job is None:
        return None
    options = job.options
    if job.parent is None and options.model.folder is not None:
        return read_plannable(Path(options.model.folder))
    if not job.follows_flags:
        return None
    return options.model.resolve(options.data.vocab_size or 256, options.data.block_size)
