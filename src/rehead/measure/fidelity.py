"""Compares the predictions of two models."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rehead.attention import LayerCache
from rehead.checkpoint.files.deferred import held
from rehead.data import IGNORE
from rehead.errors import NumericError
from rehead.measure.logits import in_parts
from rehead.model import LanguageModel, evaluating

Caches = Callable[[Tensor], Sequence[LayerCache]]
"""Makes empty caches for a forward pass over ids (B, L)."""
EXACT = 2**19
"""Logits converted to float64 at a time."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two models compared on the same tokens.

    `max_error` is the largest difference of two logits, `relative_error` that divided by the largest
    logit of the first. Both ignore each token's mean logit, which no probability depends on. `kl` is the
    mean of KL(first || second) in nats, `argmax_flips` the share of tokens whose likeliest successor
    differs, `losses` the two mean negative log-likelihoods in nats per token, `change_error` the standard
    error of the second less the first, as if tokens were independent (0 for a single one), `tokens` the
    number of tokens compared.
    """

    max_error: float
    relative_error: float
    kl: float
    argmax_flips: float
    losses: tuple[float, float]
    change_error: float
    tokens: int


@torch.no_grad()
def compare(
    first: LanguageModel,
    second: LanguageModel,
    blocks: Iterable[tuple[Tensor, Tensor]],
    caches: Caches | None = None,
) -> Comparison:
    """Compare two models, in eval mode, on blocks of (inputs, targets); targets of -100 are ignored.

    The second reads its keys and values, or latents, from `caches`, if they are given.
    Raises NumericError for a logit that is not finite.
    """
    models = (first, second)
    largest = error = 0.0
    sums = torch.zeros(5, dtype=torch.float64)  # kl, flips, both losses, squares of their changes
    count = 0
    with evaluating(*models):
        for *logits, wanted in _logits(models, blocks, caches):
            for which, part in zip(("first", "second"), logits, strict=True):
                if not part.isfinite().all():
                    raise NumericError(
                        f"the {which} model's logits are not finite on this text: it is damaged. Use another."
                    )
            ours, theirs = (part.double() - part.double().mean(-1, keepdim=True) for part in logits)
            largest = max(largest, float(ours.abs().max()))
            error = max(error, float((ours - theirs).abs().max()))
            logs = ours.log_softmax(-1), theirs.log_softmax(-1)
            sums[0] += (logs[0].exp() * (logs[0] - logs[1])).sum()
            sums[1] += (ours.argmax(-1) != theirs.argmax(-1)).sum()
            each = torch.stack([F.nll_loss(log, wanted, reduction="none") for log in logs])
            sums[2:4] += each.sum(-1)
            sums[4] += (each[1] - each[0]).square().sum()
            count += len(wanted)
    divergence, flips, *losses, square = (sums / count).tolist()
    variance = max(square - (losses[1] - losses[0]) ** 2, 0.0)
    return Comparison(
        max_error=error,
        relative_error=error / largest if largest else 0.0,
        kl=max(divergence, 0.0),
        argmax_flips=flips,
        losses=(losses[0], losses[1]),
        change_error=math.sqrt(variance / max(count - 1, 1)),
        tokens=count,
    )


def _logits(
    models: tuple[LanguageModel, LanguageModel],
    blocks: Iterable[tuple[Tensor, Tensor]],
    caches: Caches | None,
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the logits of both models and the targets, for a few tokens at a time, without ignored ones."""
    width = models[0].head.out_features
    for ids, targets in blocks:
        counts = (targets != IGNORE).flatten()
        ours, theirs = (ids.to(model.device) for model in models)
        read = None if caches is None else caches(theirs)
        both = models[0].hidden(ours), models[1].hidden(theirs, None, read)
        hidden = [one.flatten(0, 1)[counts] for one in both]
        with held(models[0].head), held(models[1].head):  # which every part of the tokens needs
            for first, second, wanted in in_parts(width, *hidden, targets.flatten()[counts]):
                logits = (models[0].logits(first).cpu(), models[1].logits(second).cpu())
                yield from in_parts(width, *logits, wanted, most=EXACT)
