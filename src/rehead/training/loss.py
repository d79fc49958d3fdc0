"""Losses over a large vocabulary without holding all logits at once."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rehead.measure import logits
from rehead.measure.logits import in_parts


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "B L D"],
    targets: Int[Tensor, "B L"],
    n_token: int,
) -> Float[Tensor, ""]:
    """Return the mean loss in nats per token; `head` gives logits over a vocabulary of `n_token` tokens.

    The logits are computed in parts, and the backward pass recomputes each part: this adds a third to the head's time
    and saves two copies of all logits.
    """

    def part(some: Tensor, their: Tensor) -> Tensor:
        return logits.cross_entropy(head, some, their, "sum")

    return _mean(part, n_token, hidden.flatten(0, 1), targets.flatten())


def distillation(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "B L D"],
    targets: Int[Tensor, "B L"],
    teacher_head: Callable[[Tensor], Tensor],
    taught: Float[Tensor, "B L C"],
    share: float,
    n_token: int,
) -> Float[Tensor, ""]:
    """Return `share` of the mean KL(teacher || model) in nats per token, and the rest of the loss on the targets.

    `taught` is the input of the teacher's head. Both logits are computed, and recomputed, in parts.
    """

    def part(some: Tensor, their: Tensor, known: Tensor) -> Tensor:
        ours = head(some).float()
        with torch.no_grad():
            wanted = teacher_head(known).float().log_softmax(-1)
        divergence = F.kl_div(ours.log_softmax(-1), wanted, log_target=True, reduction="sum")
        return share * divergence + (1 - share) * F.cross_entropy(ours, their, reduction="sum")

    rows = hidden.flatten(0, 1), targets.flatten(), taught.flatten(0, 1)
    return _mean(part, n_token, *rows)


def _mean(part: Callable[..., Tensor], n_token: int, *rows: Tensor) -> Tensor:
    """Return the sum of `part` over parts of `rows`, divided by the number of rows; nothing within a part is kept."""
    sums = [
        checkpoint(part, *some, use_reentrant=False, preserve_rng_state=False)
        for some in in_parts(n_token, *rows)
    ]
    return torch.stack(sums).sum() / len(rows[0])
