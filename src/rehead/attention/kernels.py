"""How attention is computed. `reference` is the definition; the others must agree with it."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from rehead.attention import flash
from rehead.attention.blocked import blocked
from rehead.attention.dropout import is_ours
from rehead.attention.fused import continued, sdpa, windowed
from rehead.attention.mask import Mask
from rehead.attention.sequence import refuses as sequence_refuses
from rehead.attention.sequence import sequence

ScoreFunction = Callable[[Tensor, Tensor], Tensor]
FEW_QUERIES = {torch.float64: 4, torch.float32: 4, torch.float16: 4, torch.bfloat16: 8}
"""Up to this many queries per call the folded kernel is used (decoding, short chunks); measured, docs/log.md."""

LONG = 512
"""From this many keys on, windows are computed in chunks, and a chunk after its past in two parts."""

MANY = 1 << 24
"""From this many weights in one call on, computing all of them is said to be slow."""


@cache
def _slow() -> None:
    """Say so, once a process."""
    logging.getLogger("rehead").warning(
        f"slow: {MANY:,} attention weights and more in one call, of a learned score or on request, are computed whole"
    )


def _scale(scale: float | None, key: Tensor) -> float:
    return float(key.shape[-1] ** -0.5) if scale is None else scale


def weights(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    mask: Bool[Tensor, "#B L S"] | None = None,
    *,
    scale: float | None = None,
    score: ScoreFunction | None = None,
) -> Float[Tensor, "B K G L S"]:
    """The attention weights: softmax of the scores over the visible keys, zero elsewhere.

    `scale` is E ** -0.5 unless given; `score` replaces the scaled dot product and does its own
    scaling. A query that sees nothing has weights 0.
    """
    if not torch.compiler.is_compiling() and query[..., 0].numel() * key.shape[1] >= MANY:
        _slow()
    query = query.unflatten(2, (key.shape[2], -1))  # H -> K G
    if score is None:
        scores = torch.einsum("blkge,bske->bkgls", query, key) * _scale(scale, key)
    else:
        scores = score(query, key)
    exact = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return scores.softmax(dim=-1, dtype=exact).to(scores.dtype)
    mask = mask[:, None, None]
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


def folded(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> Float[Tensor, "B L H V"]:
    """Few queries over many keys: the G heads of one KV head become G more queries.

    Two matrix products a KV head; keys and values are read once and never repeated.
    """
    batch, n_query, n_kv_head = query.shape[0], query.shape[1], key.shape[2]
    query = query.unflatten(2, (n_kv_head, -1)).permute(0, 2, 3, 1, 4)  # B K G L E
    scores = query.flatten(2, 3) @ key.permute(0, 2, 3, 1) * _scale(scale, key)
    dense = mask.dense(query.device)
    if dense is not None:
        dense = dense[:, None, None].expand(batch, 1, query.shape[2], -1, -1).flatten(2, 3)  # B 1 GL S
        sees = dense.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~dense & sees, float("-inf"))
    exact = torch.promote_types(scores.dtype, torch.float32)
    attention = scores.softmax(dim=-1, dtype=exact).to(scores.dtype)
    if dense is not None:
        attention = attention.masked_fill(~sees, 0.0)
    context = attention @ value.transpose(1, 2)  # B K GL V
    return context.unflatten(2, (-1, n_query)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # B L H V


@dataclass(frozen=True)
class Choice:
    """The way in which `attend` computes a call, and the reason against each way it would rather take.

    `form` says in which form a layer called `attend`, where it has several.
    """

    way: str
    against: dict[str, str]
    form: str = ""


def choose(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    score: ScoreFunction | None = None,
    pdrop: float = 0.0,
) -> Choice:
    """The first of `WAYS` that does not refuse these arguments. Reads sizes, types and the mask's rule only."""
    against: dict[str, str] = {}
    if score is not None:
        return Choice("reference", dict.fromkeys(WAYS, "a learned score"))
    for way, refuses in WAYS.items():
        reason = refuses(query, key, value, mask, pdrop)
        if reason is None:
            break  # the last refuses nothing
        against[way] = reason
    return Choice(way, against)


Refuses = Callable[[Tensor, Tensor, Tensor, Mask, float], str | None]


def _folded(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    if pdrop:
        return "weights are dropped"
    return None if query.shape[1] <= FEW_QUERIES[query.dtype] else "many queries"


def _compiled(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    return sequence_refuses(query, key, value, mask, pdrop)


def _windowed(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    if not mask.is_band:
        return "no window, or positions are given"
    return None if mask.n_key >= max(LONG, 2 * (mask.window or 0)) else "few keys"


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    if pdrop:
        return "weights are dropped"
    return _windowed(query, key, value, mask, pdrop) or flash.refuses(query, key, value)


def _blocked(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    if not pdrop:
        return "no weights are dropped"
    return None if is_ours(query) else "not on a CPU, or a compiled graph"


def _continued(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    if query.device.type != "cpu" or torch.is_grad_enabled() or pdrop:
        return "not on a CPU without gradients"
    return None if mask.is_causal_chunk and mask.n_key >= LONG else "no long past before the queries"


WAYS: dict[str, Refuses] = {
    "folded": _folded,
    "C++": _compiled,
    "flash": _flash,
    "windowed": _windowed,
    "blocked": _blocked,
    "continued": _continued,
    "SDPA": lambda *_: None,
}
"""Why a way is not for a call, None where it is, in the order of preference (measured, docs/log.md)."""


def attend(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
    score: ScoreFunction | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """`reference`, by the way that `choose` chooses."""
    match choose(query, key, value, mask, score=score, pdrop=pdrop).way:
        case "reference":
            return reference(query, key, value, mask.dense(query.device), score=score, pdrop=pdrop)
        case "folded":
            return folded(query, key, value, mask, scale=scale)
        case "C++":
            return sequence(query, key, value, mask, scale=scale, pdrop=pdrop)
        case "flash":
            return flash.windowed(query, key, value, mask, scale=scale)
        case "windowed":
            return windowed(query, key, value, mask, scale=scale, pdrop=pdrop)
        case "blocked":
            return blocked(query, key, value, mask.dense(), scale=scale, pdrop=pdrop)
        case "continued":
            return continued(query, key, value, scale=scale)
        case _:
            return sdpa(query, key, value, mask, scale=scale, pdrop=pdrop)
