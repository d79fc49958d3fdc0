"""Cross entropy over a large vocabulary without holding all logits at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS = 2**24
"""Logits held at a time: 64 MB in float32, and the same again for their gradient."""


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "B L D"],
    targets: Int[Tensor, "B L"],
    n_token: int,
) -> Float[Tensor, ""]:
    """Return the mean loss in nats per token; `head` gives logits of `n_token` tokens.

    More than `LOGITS` logits are computed in parts, and the backward pass recomputes each part: that costs a third
    of the head's time and saves two copies of all logits.
    """
    rows, wanted = hidden.flatten(0, 1), targets.flatten()
    size = max(1, LOGITS // n_token)
    if len(rows) <= size:
        return _loss(head, rows, wanted, "mean")
    parts = [
        checkpoint(_loss, head, some, their, "sum", use_reentrant=False, preserve_rng_state=False)
        for some, their in zip(rows.split(size), wanted.split(size), strict=True)
    ]
    return torch.stack(parts).sum() / len(rows)


def _loss(head: Callable[[Tensor], Tensor], rows: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = head(rows)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, reduction=reduction)
