"""Measures how well a model predicts a text."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.data import IGNORE
from rehead.errors import InvalidInput, NumericError, UsageError
from rehead.model import LanguageModel, evaluating

MOST_BLOCKS, MOST_TOKENS = 32, 8192
"""Default limits of one batch."""
LOGITS = 2**25
"""Logits computed at a time: 8,192 tokens of a vocabulary of 49,152 would take 1.6 GB."""


@torch.no_grad()
def evaluate(model: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    """Return the mean negative log-likelihood in nats per token over (inputs, targets), and the token count.

    The model runs in eval mode and keeps the mode it had. Targets of -100 are ignored. Sums are float64,
    so the batching of the blocks changes the mean only through the model's own rounding.
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
    """Return tokens per block and blocks per batch for a model of `block_size`: the arguments, or defaults.

    Raises UsageError for a length beyond `block_size`.
    """
    length = block_size if length is None else length
    if not 1 <= length <= block_size:
        raise UsageError(
            f"length={length}: the model reads at most block_size={block_size}. Use 1 to {block_size}."
        )
    return length, max(1, min(MOST_BLOCKS, MOST_TOKENS // length)) if batch_size is None else batch_size


def scores(loss: float, n_token: int, n_byte: int) -> dict[str, float | int]:
    """Return `loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens` of a text of `n_byte` bytes."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * n_token / math.log(2) / n_byte,
        "tokens": n_token,
    }
