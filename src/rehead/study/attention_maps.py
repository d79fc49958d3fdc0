"""Attention maps of every variant on the same text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rehead.checkpoint import read_config
from rehead.checkpoint.find import read_at
from rehead.config import GPTConfig
from rehead.measure.attention_maps import attention_maps
from rehead.model import GPT
from rehead.study.job import Job, firsts
from rehead.study.prompt import unknown_characters
from rehead.study.work import load, texts_of
from rehead.tokenizer import load_tokenizer

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
    """Return the maps by variant, from the first job of each.

    Models without attention are left out, and those whose tokenizer lacks a character of the text.
    """
    configs = [read_at(job.model, read_config) for job in firsts(jobs)]
    windows = [
        layer.window for config in configs if isinstance(config, GPTConfig) for layer in config.attention
    ]
    texts, tokenizer = texts_of(jobs[0])
    text = tokenizer.decode([int(token) for token in texts.val[: n_token(windows)]])
    by_variant: dict[str, Maps] = {}
    for job in firsts(jobs):
        model, own = load(job), load_tokenizer(job.model)
        if not isinstance(model, GPT) or unknown_characters(own, text):
            continue
        begin = [] if own.bos is None else [own.bos]
        ids = torch.tensor([*begin, *own.encode(text)])[: model.config.block_size]
        model.float()  # in float16, softmax makes zeros of small weights, as if they were masked
        by_variant[job.variant] = Maps(
            tokens=[own.decode([int(token)]) for token in ids],
            weights=attention_maps(model, ids),
            windows=[layer.window for layer in model.config.attention],
        )
    return by_variant


def n_token(windows: Sequence[int | None]) -> int:
    """Return how many tokens to show: enough for every window to hide some keys, but at most MOST_TOKENS."""
    return min(max([TOKENS, *(3 * window // 2 for window in windows if window is not None)]), MOST_TOKENS)
