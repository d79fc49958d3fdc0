"""Attention that drops weights in training, a few sequences at a time, on a CPU.

A block of weights is computed, normalised, dropped and used while it lies in the processor's cache. The weights are
kept once for the backward pass, dropped ones with a minus sign, instead of three times with a mask.
"""

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.nn.dropout import STEPS, WHOLE, draw, is_ours, threshold

BLOCK = 1 << 18
"""Weights computed at a time, at least those of one sequence: 1 MB in float32."""


class Blocked(Kernel):
    """The reference with dropout, forward and backward; weights are computed in float32 or better."""

    name = "blocked"
    words = "blocks of dropped weights"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """See `Kernel.limit`."""
        if not call.pdrop:
            return "no weights are dropped"
        return None if is_ours(call.query) else "not on a CPU, or a compiled graph"

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """See `Kernel.run`."""
        with torch.autocast("cpu", enabled=False):
            return _Blocked.apply(call.query, call.key, call.value, call.mask.dense(), call.scale, call.pdrop)


class _Blocked(torch.autograd.Function):
    """With s what is kept: the weights are |s|, those used max(s, 0)."""

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
        kept, hidden = torch.empty(rows, dtype=exact), _Hidden(mask, key.shape[2], group, exact)
        for some, there in _blocks(query, key):
            weights = kept[there]
            q, k, v = _fold(query[some], group, exact), _heads(key[some], exact), _heads(value[some], exact)
            added, blind = hidden.of(some)
            scores = torch.baddbmm(added, q, k.transpose(1, 2), alpha=scale)
            scores = torch.softmax(scores, dim=-1)
            signs = (draw(scores.shape) - dropped).to(whole).bitwise_and_(torch.iinfo(whole).min)
            torch.bitwise_or(scores.view(whole), signs, out=weights.view(whole))
            if blind is not None:
                weights.masked_fill_(blind, 0.0)
            gathered = torch.bmm(weights.clamp_min(0.0), v).mul_(STEPS / (STEPS - dropped))
            out[some] = _unfold(gathered, query[some], group)
        ctx.save_for_backward(query, key, value, out, kept)
        ctx.scale, ctx.dropped = scale, dropped
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, kept = ctx.saved_tensors
        exact, group = kept.dtype, query.shape[2] // key.shape[2]
        grads = [torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value)]
        for some, there in _blocks(query, key):
            q, k, v = _fold(query[some], group, exact), _heads(key[some], exact), _heads(value[some], exact)
            upstream = _fold(gradient[some], group, exact)
            mean = _fold((gradient[some] * out[some]).sum(dim=-1, keepdim=True, dtype=exact), group, exact)
            upstream = upstream * (STEPS / (STEPS - ctx.dropped))
            weights = kept[there]
            used = weights.clamp_min(0.0)
            scores = torch.bmm(upstream, v.transpose(1, 2)).mul_(used)
            scores.addcmul_(weights.abs(), mean, value=-1.0)
            grads[0][some] = _unfold(torch.bmm(scores, k).mul_(ctx.scale), query[some], group)
            grads[1][some] = _unfold(torch.bmm(scores.transpose(1, 2), q).mul_(ctx.scale), key[some], 1)
            grads[2][some] = _unfold(torch.bmm(used.transpose(1, 2), upstream), value[some], 1)
        return (*grads, None, None, None)


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[slice, slice]]:
    """Sequences computed together, and the places of their KV heads."""
    n_head = key.shape[2]
    size = max(1, BLOCK // max(1, query.shape[1] * query.shape[2] * key.shape[1]))
    for start in range(0, len(query), size):
        some = slice(start, min(start + size, len(query)))
        yield some, slice(some.start * n_head, some.stop * n_head)


def _heads(t: Float[Tensor, "B S K E"], exact: torch.dtype) -> Float[Tensor, "BK S E"]:
    return t.transpose(1, 2).flatten(0, 1).to(exact)


def _fold(t: Float[Tensor, "B L H E"], group: int, exact: torch.dtype) -> Float[Tensor, "BK GL E"]:
    """The query heads of a KV head one after another, as more queries."""
    return (
        t.unflatten(2, (-1, group))
        .permute(0, 2, 3, 1, 4)
        .reshape(-1, group * t.shape[1], t.shape[3])
        .to(exact)
    )


def _unfold(
    t: Float[Tensor, "BK GL E"], like: Float[Tensor, "B L H _"], group: int
) -> Float[Tensor, "B L H E"]:
    """Back from `_fold`."""
    n_row, n_query, n_head, _ = like.shape
    return t.view(n_row, n_head // group, group, n_query, -1).permute(0, 3, 1, 2, 4).flatten(2, 3)


class _Hidden:
    """What is added to the scores of a block, minus infinity where hidden, and the rows that see nothing."""

    def __init__(
        self, mask: Bool[Tensor, "#B L S"] | None, n_head: int, group: int, exact: torch.dtype
    ) -> None:
        self.n_head, self.common = n_head, mask is None or len(mask) == 1
        mask = torch.ones(1, 1, 1, dtype=torch.bool) if mask is None else mask.repeat(1, group, 1)
        sees = mask.any(dim=-1, keepdim=True)
        self.added = torch.zeros(mask.shape, dtype=exact).masked_fill_(~mask & sees, float("-inf"))
        self.blind = None if bool(sees.all()) else ~sees

    def of(self, some: slice) -> tuple[Tensor, Tensor | None]:
        """For these sequences, once per KV head."""
        if self.common:
            return self.added, self.blind
        blind = None if self.blind is None else self.blind[some].repeat_interleave(self.n_head, 0)
        return self.added[some].repeat_interleave(self.n_head, 0), blind
