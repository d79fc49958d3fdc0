"""Attention with dropout in training, a few sequences at a time, on a CPU.

A block of weights is computed, normalised, dropped and used while it is in the processor's cache. The weights are
saved once for the backward pass, dropped ones with a minus sign, instead of three times with a mask.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from rehead.attention.kernels.base import Call, Kernel
from rehead.nn.dropout import STEPS, WHOLE, draw, is_ours, threshold

BLOCK = 1 << 18
"""Number of weights computed at a time, 1 MB in float32; at least those of one sequence."""


class Blocked(Kernel):
    """The reference with dropout, forward and backward; weights are computed in float32 or better."""

    name = "blocked"
    words = "blocks of dropped weights"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """Accept calls with dropout on a CPU."""
        if not call.pdrop:
            return "no weights are dropped"
        if len(call.key) != len(call.query):
            return "keys are shared by several sequences"
        return None if is_ours(call.query) else "not on a CPU, or a compiled graph"

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call block by block."""
        with torch.autocast("cpu", enabled=False):
            return _Blocked.apply(call.query, call.key, call.value, call.mask.dense(), call.scale, call.pdrop)


class _Blocked(torch.autograd.Function):
    """With s the saved tensor, the weights are |s|, and those that dropout keeps max(s, 0), before rescaling."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        pdrop: float,
    ) -> Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        group, dropped, whole = query.shape[2] // key.shape[2], threshold(pdrop), WHOLE[exact.itemsize]
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        rows = len(query) * key.shape[2], group * query.shape[1], key.shape[1]
        saved = torch.empty(rows, dtype=exact, device=query.device)
        bias = _Bias(mask, key.shape[2], group, exact)
        for block, heads in _blocks(query, key):
            weights = saved[heads]
            q = _fold(query[block], group, exact)
            k, v = _heads(key[block], exact), _heads(value[block], exact)
            added, blind = bias.of(block)
            scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=scale)
            scores = torch.softmax(scores, dim=-1)
            signs = (draw(scores.shape) - dropped).to(whole).bitwise_and_(torch.iinfo(whole).min)
            torch.bitwise_or(scores.view(whole), signs, out=weights.view(whole))
            if blind is not None:
                weights.masked_fill_(blind, 0.0)
            context = torch.bmm(weights.clamp_min(0.0), v).mul_(STEPS / (STEPS - dropped))
            out[block] = _unfold(context, query[block], group)
        ctx.save_for_backward(query, key, value, out, saved)
        ctx.scale, ctx.dropped = scale, dropped
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, saved = ctx.saved_tensors
        exact, group = saved.dtype, query.shape[2] // key.shape[2]
        grads = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value)]
        for block, heads in _blocks(query, key):
            q = _fold(query[block], group, exact)
            k, v = _heads(key[block], exact), _heads(value[block], exact)
            upstream = _fold(gradient[block], group, exact)
            mean = _fold((gradient[block] * out[block]).sum(dim=-1, keepdim=True, dtype=exact), group, exact)
            upstream = upstream * (STEPS / (STEPS - ctx.dropped))
            weights = saved[heads]
            used = weights.clamp_min(0.0)
            scores = torch.bmm(upstream, v.transpose(1, 2)).mul_(used)
            scores.addcmul_(weights.abs(), mean, value=-1.0)
            grads[0][block] = _unfold(torch.bmm(scores, k).mul_(ctx.scale), query[block], group)
            grads[1][block] = _unfold(torch.bmm(scores.transpose(1, 2), q).mul_(ctx.scale), key[block], 1)
            grads[2][block] = _unfold(torch.bmm(used.transpose(1, 2), upstream), value[block], 1)
        return (*grads, None, None, None)


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the sequences that are computed together, and of their KV heads."""
    n_head = key.shape[2]
    size = max(1, BLOCK // max(1, query.shape[1] * query.shape[2] * key.shape[1]))
    for start in range(0, len(query), size):
        block = slice(start, min(start + size, len(query)))
        yield block, slice(block.start * n_head, block.stop * n_head)


def _heads(t: Float[Tensor, "B S K E"], exact: torch.dtype) -> Float[Tensor, "BK S E"]:
    return t.transpose(1, 2).flatten(0, 1).to(exact)


def _fold(t: Float[Tensor, "B L H E"], group: int, exact: torch.dtype) -> Float[Tensor, "BK GL E"]:
    """Fold the query heads of a KV head into the query axis."""
    folded = t.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)
    return folded.reshape(-1, group * t.shape[1], t.shape[3]).to(exact)


def _unfold(
    t: Float[Tensor, "BK GL E"], like: Float[Tensor, "B L H _"], group: int
) -> Float[Tensor, "B L H E"]:
    """Undo `_fold`."""
    n_row, n_query, n_head, _ = like.shape
    return t.view(n_row, n_head // group, group, n_query, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Bias:
    """The bias of the scores of a block, minus infinity for hidden keys, and the rows without visible keys."""

    def __init__(
        self, mask: Bool[Tensor, "#B L S"] | None, n_head: int, group: int, exact: torch.dtype
    ) -> None:
        self.n_head, self.is_shared = n_head, mask is None or len(mask) == 1
        mask = (
            torch.ones(1, 1, 1, dtype=torch.bool, device="cpu") if mask is None else mask.repeat(1, group, 1)
        )
        sees = mask.any(dim=-1, keepdim=True)
        self.added = torch.zeros(mask.shape, dtype=exact, device=mask.device).masked_fill_(
            ~mask & sees, float("-inf")
        )
        self.blind = None if bool(sees.all()) else ~sees

    def of(self, block: slice) -> tuple[Tensor, Tensor | None]:
        """Return both for the sequences of `block`, repeated for each KV head."""
        if self.is_shared:
            return self.added, self.blind
        blind = None if self.blind is None else self.blind[block].repeat_interleave(self.n_head, 0)
        return self.added[block].repeat_interleave(self.n_head, 0), blind
