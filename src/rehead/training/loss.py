"""Losses over a large vocabulary without holding all logits at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rehead.measure import logits
from rehead.measure.logits import in_parts


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    hidden: Float[Tensor, "B L D"],
    targets: Int[Tensor, "B L"],
    n_token: int,
) -> Float[Tensor, ""]:
    """Return the mean loss in nats per token; `head` gives logits over a vocabulary of `n_token` tokens.

    The logits are computed in parts, each with its gradient to `hidden` and to `weights`, those of the head that are
    trained: this saves two copies of all logits.
    """

    def part(some: Tensor, their: Tensor) -> Tensor:
        return logits.cross_entropy(head, some, their, "sum")

    return _mean(part, weights, n_token, hidden.flatten(0, 1), targets.flatten())


def distillation(
    head: Callable[[Tensor], Tensor],
    weights: Sequence[Tensor],
    hidden: Float[Tensor, "B L D"],
    targets: Int[Tensor, "B L"],
    teacher_head: Callable[[Tensor], Tensor],
    taught: Float[Tensor, "B L C"],
    share: float,
    n_token: int,
) -> Float[Tensor, ""]:
    """Return `share` of the mean KL(teacher || model) in nats per token, and the rest of the loss on the targets.

    `taught` is the input of the teacher's head. Both logits are computed in parts, as in `cross_entropy`.
    """

    def part(some: Tensor, their: Tensor, known: Tensor) -> Tensor:
        ours = head(some).float().log_softmax(-1)
        with torch.no_grad():
            wanted = teacher_head(known).float().log_softmax(-1)
        divergence = F.kl_div(ours, wanted, log_target=True, reduction="sum")
        if share == 1:
            return divergence
        return share * divergence + (1 - share) * F.nll_loss(ours, their, reduction="sum")

    rows = hidden.flatten(0, 1), targets.flatten(), taught.flatten(0, 1)
    return _mean(part, weights, n_token, *rows)


def _mean(
    part: Callable[..., Tensor], weights: Sequence[Tensor], n_token: int, hidden: Tensor, *rows: Tensor
) -> Tensor:
    """Return the sum of `part` over parts of the rows, divided by their number; of a part only gradients are kept."""
    mean: Tensor = _Mean.apply(part, n_token, rows, hidden, *weights)
    return mean


class _Mean(torch.autograd.Function):
    """A mean loss whose gradient is computed with it, so that the backward pass need not recompute the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Callable[..., Tensor],
        n_token: int,
        rows: tuple[Tensor, ...],
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        sums, to_hidden = [], []
        to_weights = [torch.zeros_like(weight) for weight in weights]
        for some, *others in in_parts(n_token, hidden, *rows):
            with torch.enable_grad():
                leaf = some.detach().requires_grad_()
                sums.append(part(leaf, *others))
            share = torch.full_like(sums[-1], 1 / len(hidden))
            first, *rest = torch.autograd.grad(sums[-1], [leaf, *weights], share)
            to_hidden.append(first)
            for total, more in zip(to_weights, rest, strict=True):
                total += more
        ctx.save_for_backward(torch.cat(to_hidden), *to_weights)
        return torch.stack(sums).sum() / len(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *(gradient * one for one in ctx.saved_tensors)
