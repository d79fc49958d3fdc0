"""How well a model predicts a text."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.data import IGNORE
from rehead.errors import InvalidInput, NumericError, UsageError
from rehead.model import LanguageModel, evaluating

MOST_BLOCKS, MOST_TOKENS = 32, 8192
"""Read at once unless more is asked for."""
LOGITS = 2**25
"""Computed at once, about: those of 8,192 tokens of a vocabulary of 49,152 are 1.6 GB."""


@torch.no_grad()
def evaluate(model: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Mean negative log-likelihood in nats per token over (inputs, targets), and how many tokens.

    In eval mode; the model is left in the mode it was in. Targets of -100 do not count. Sums are
    float64, so the mean does not depend on how the blocks are batched beyond the model's own rounding.
    """
    model.require_generates()
    total, count = 0.0, 0
    with evaluating(model):
        for inputs, targets in blocks:
            hidden = model.hidden(inputs.to(model.device)).flatten(0, 1)
            rows = max(1, LOGITS // model.head.out_features)
            for some, wanted in zip(
                hidden.split(rows), targets.to(model.device).flatten().split(rows), strict=True
            ):
                losses = F.cross_entropy(
                    model.logits(some).float(), wanted, ignore_index=IGNORE, reduction="none"
                )
                total += float(losses.double().sum())
            count += int((targets != IGNORE).sum())
    if count == 0:
        raise InvalidInput("0 tokens to evaluate: the text needs at least two.")
    if not math.isfinite(total):
        raise NumericError(f"the loss is {total}: the model's weights are damaged, or it has diverged.")
    return total / count, count


def blocks_of(block_size: int, length: int | None = None, batch_size: int | None = None) -> tuple[int, int]:
    """Tokens in a block, and blocks at once, for a model of `block_size`: what is asked for, or what fits.

    UsageError for a length that the model does not have.
    """
    length = block_size if length is None else length
    if not 1 <= length <= block_size:
        raise UsageError(
            f"length={length}: the model reads at most block_size={block_size}. Use 1 to {block_size}."
        )
    return length, max(1, min(MOST_BLOCKS, MOST_TOKENS // length)) if batch_size is None else batch_size


def scores(loss: float, n_token: int, n_byte: int) -> dict[str, float | int]:
    """`loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens`, of a text of `n_byte` bytes."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * n_token / math.log(2) / n_byte,
        "tokens": n_token,
    }
