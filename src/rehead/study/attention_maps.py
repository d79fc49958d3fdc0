"""Attention maps of every variant on the same text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rehead import checkpoint
from rehead.data import split
from rehead.measure.attention_maps import attention_maps
from rehead.model import GPT
from rehead.study.job import Job, firsts
from rehead.study.work import load
from rehead.tokenizer import load_tokenizer
from rehead.training.folder import RunFolder
from rehead.training.start import read_text

TOKENS = 24
"""First tokens of the validation text that are shown; more if a window would not show."""
MOST_TOKENS = 96
"""Limit of a map, because the page grows with its square."""


@dataclass(frozen=True, kw_only=True)
class Maps:
    """A text's tokens, and for every layer the weights (H, L, L) and the window or None."""

    tokens: list[str]
    weights: list[Tensor]
    windows: list[int | None]


def maps(jobs: Sequence[Job]) -> dict[str, Maps]:
    """Return the maps by variant, from the first job of each; models without attention are left out."""
    models = [(job, model) for job in firsts(jobs) if isinstance(model := load(job), GPT)]
    tokenizer, tokens = read_text(
        jobs[0].options, RunFolder(jobs[0].folder).tokens, checkpoint.resolve(jobs[0].model)
    )
    data = jobs[0].options.data
    windows = [layer.window for _, model in models for layer in model.config.attention]
    shown = split(tokens.ids, data.block_size, data.val_fraction).val[: n_token(windows)]
    text = tokenizer.decode([int(token) for token in shown])
    by_variant: dict[str, Maps] = {}
    for job, model in models:
        own = load_tokenizer(job.model)
        ids = torch.from_numpy(own.encode(text)).long()[: model.config.block_size]
        by_variant[job.variant] = Maps(
            tokens=[own.decode([int(token)]) for token in ids],
            weights=attention_maps(model, ids),
            windows=[layer.window for layer in model.config.attention],
        )
    return by_variant


def n_token(windows: Sequence[int | None]) -> int:
    """Return a number of tokens, at most MOST_TOKENS, at which every window hides some keys."""
    return min(max([TOKENS, *(3 * window // 2 for window in windows if window is not None)]), MOST_TOKENS)
