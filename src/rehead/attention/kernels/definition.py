"""The definition of attention. Every kernel must agree with it."""

import logging
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel, ScoreFunction, words_of

MANY = 1 << 24
"""Number of weights in one call from which the reference kernel logs that it is slow."""


def weights(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    mask: Bool[Tensor, "#B L S"] | None = None,
    *,
    scale: float | None = None,
    score: ScoreFunction | None = None,
) -> Float[Tensor, "B K G L S"]:
    """Attention weights: softmax of the scores over the visible keys, zero elsewhere.

    `scale` defaults to E ** -0.5; `score` replaces the scaled dot product and does its own
    scaling. A query without visible keys has weights 0.
    """
    if not torch.compiler.is_compiling() and query[..., 0].numel() * key.shape[1] >= MANY:
        _warn_slow("request" if score is None else words_of(score))
    query = query.unflatten(2, (key.shape[2], -1))  # H -> K G
    if score is None:
        scale = float(key.shape[-1] ** -0.5) if scale is None else scale
        scores = torch.einsum("blkge,bske->bkgls", query, key) * scale
    else:
        scores = score(query, key)
    return softmax(scores, None if mask is None else mask[:, None, None])


def softmax(
    scores: Float[Tensor, "... S"], mask: Bool[Tensor, "... S"] | None = None
) -> Float[Tensor, "... S"]:
    """Softmax over the keys that `mask` shows, in float32 or better; 0 for a query that sees none."""
    exact = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return scores.softmax(dim=-1, dtype=exact).to(scores.dtype)
    sees = mask.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~mask & sees, float("-inf"))
    return scores.softmax(dim=-1, dtype=exact).masked_fill(~sees, 0.0).to(scores.dtype)


def reference(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Bool[Tensor, "#B L S"] | None = None,
    *,
    scale: float | None = None,
    score: ScoreFunction | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """Attention by definition: any score, any mask; query head h reads KV head h // (H/K)."""
    attention = F.dropout(weights(query, key, mask, scale=scale, score=score), pdrop)
    return torch.einsum("bkgls,bskv->blkgv", attention, value).flatten(2, 3)  # K G -> H


class Reference(Kernel):
    """`reference`: the only kernel of learned scores."""

    name = "reference"
    words = "the reference kernel (slow, O(L^2) memory)"
    takes_scores = True
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """Return None: every call is accepted."""
        return None

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call by definition."""
        dense = call.mask.dense(call.query.device)
        return reference(
            call.query, call.key, call.value, dense, scale=call.scale, score=call.score, pdrop=call.pdrop
        )


@cache
def _warn_slow(why: str) -> None:
    """Log once per process and reason."""
    logging.getLogger("rehead").warning(
        f"slow: at least {MANY:,} attention weights in one call with the reference kernel ({why})"
    )
