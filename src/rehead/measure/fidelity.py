"""How closely one model's predictions follow another's."""

from collections.abc import Iterable

import torch
from torch import Tensor

from rehead.data import IGNORE
from rehead.model import LanguageModel


@torch.no_grad()
def compare(
    reference: LanguageModel, other: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]]
) -> dict[str, float]:
    """Logits of `other` against those of `reference` where both read the same tokens.

    `max_error` is the largest difference, `relative_error` that divided by the largest reference logit,
    both after each token's mean is taken off, which no probability depends on. `kl` is the mean
    divergence KL(reference || other) in nats, `argmax_flips` the share of tokens whose likeliest
    successor is another, `tokens` how many were compared. Targets of -100 do not count.
    """
    modes = reference.training, other.training
    reference.eval(), other.eval()
    largest = error = divergence = flips = 0.0
    count = 0
    for ids, targets in blocks:
        counts = (targets != IGNORE).flatten()
        logits = [
            model(ids.to(model.device)).flatten(0, 1).cpu()[counts].double() for model in (reference, other)
        ]
        here, there = (one - one.mean(dim=-1, keepdim=True) for one in logits)
        largest = max(largest, float(here.abs().max()))
        error = max(error, float((here - there).abs().max()))
        log_here, log_there = here.log_softmax(-1), there.log_softmax(-1)
        divergence += float((log_here.exp() * (log_here - log_there)).sum())
        flips += float((here.argmax(-1) != there.argmax(-1)).sum())
        count += len(here)
    reference.train(modes[0]), other.train(modes[1])
    return {
        "max_error": error,
        "relative_error": error / largest if largest else 0.0,
        "kl": max(divergence / count, 0.0),
        "argmax_flips": flips / count,
        "tokens": count,
    }
