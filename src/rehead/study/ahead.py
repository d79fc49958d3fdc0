"""Checks the texts and the prompt of a study before it trains anything."""

from collections.abc import Sequence

from rehead.data import source_of
from rehead.errors import ConfigError, InvalidInput
from rehead.study.check import config_of
from rehead.study.job import Job
from rehead.study.preset import Preset
from rehead.tokenizer import load_tokenizer


def require_texts(jobs: Sequence[Job], preset: Preset) -> None:
    """Raise InvalidInput for an unreadable text, and ConfigError for a prompt longer than a model's context.

    Only the beginning of a text is read, and no corpus by name, which may need a download. A prompt is
    checked if its tokens can be counted already.
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
                f"{preset.file}: prompt has {n_token} tokens, {job.variant} reads {limit}: give a shorter prompt."
            )


def _count(prompt: str, job: Job) -> int | None:
    """Return the number of tokens, with one that begins every text.

    None if the tokenizer is not trained yet, or lacks a character.
    """
    while job.parent is not None:
        job = job.parent
    before = job.options.model.folder or job.options.model.pretrained_folder
    if before is not None:
        try:
            tokenizer = load_tokenizer(before)
            return len(tokenizer.encode(prompt)) + (tokenizer.bos is not None)
        except InvalidInput:
            return None
    return {"char": len(prompt), "byte": len(prompt.encode())}.get(job.options.data.tokenizer)
