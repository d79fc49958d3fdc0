"""How well a model predicts a text."""

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.data import IGNORE
from rehead.errors import InvalidInput, NumericError
from rehead.model import LanguageModel, evaluating


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
            logits = model(inputs.to(model.device)).flatten(0, 1).float()
            losses = F.cross_entropy(
                logits, targets.to(model.device).flatten(), ignore_index=IGNORE, reduction="none"
            )
            total += float(losses.double().sum())
            count += int((targets != IGNORE).sum())
    if count == 0:
        raise InvalidInput("0 tokens to evaluate: the text needs at least two.")
    if not math.isfinite(total):
        raise NumericError(f"the loss is {total}: the model's weights are damaged, or it has diverged.")
    return total / count, count


def scores(loss: float, n_token: int, n_byte: int) -> dict[str, float | int]:
    """`loss` (nats per token), `perplexity`, `bits_per_byte` and `tokens`, of a text of `n_byte` bytes."""
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * n_token / math.log(2) / n_byte,
        "tokens": n_token,
    }
