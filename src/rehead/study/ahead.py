"""What its texts are refused for before a study trains anything."""

from collections.abc import Sequence

from rehead.data import source_of
from rehead.errors import ConfigError, InvalidInput
from rehead.study.grid import config_of
from rehead.study.job import Job
from rehead.study.preset import Preset
from rehead.tokenizer import load_tokenizer


def require_texts(jobs: Sequence[Job], preset: Preset) -> None:
    """Refuse a text that cannot be read, and a prompt longer than a model reads where its tokens can be counted.

    Only the beginning of a text is read; a corpus by name, which may have to be downloaded, is not.
    """
    for data in {job.options.data.path: job.options.data for job in jobs}.values():
        if data.path is not None:
            next(iter(source_of(data)), None)
    for job in jobs:
        config = config_of(job)
        limit = None if config is None else config.context_limit
        n_token = None if preset.prompt is None or limit is None else _count(preset.prompt, job)
        if limit is not None and n_token is not None and n_token > limit:
            raise ConfigError(
                f"{preset.file}: prompt has {n_token} tokens, {job.variant} reads {limit}: give a shorter one."
            )


def _count(prompt: str, job: Job) -> int | None:
    """Tokens of the prompt; None where the vocabulary is still to be made, or lacks a letter of it."""
    while job.parent is not None:
        job = job.parent
    before = job.options.model.folder or job.options.model.pretrained_folder
    if before is not None:
        try:
            return len(load_tokenizer(before).encode(prompt))
        except InvalidInput:
            return None
    return {"char": len(prompt), "byte": len(prompt.encode())}.get(job.options.data.tokenizer)
