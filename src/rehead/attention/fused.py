"""PyTorch's fused attention, and what is put together of it: sliding windows, chunks after a past.

None of them holds a matrix of all queries and keys.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.attention.blocked import blocked
from rehead.attention.dropout import is_ours
from rehead.attention.mask import Mask

CHUNK = 64
"""Queries of a window that are computed together at most (measured, docs/log.md)."""


def sdpa(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """PyTorch's kernels: O(L) memory in training and prefill, but for the mask.

    They want one width, so the narrower of E and V is filled up with zeros, which change nothing.
    """
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    n_value = value.shape[-1]
    query, key, value = (t.transpose(1, 2) for t in _of_one_width(query, key, value))
    square = mask.is_causal_square
    dense = None if square else mask.dense(query.device)
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if dense is None else dense[:, None],
        dropout_p=pdrop,
        is_causal=square,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return context.transpose(1, 2)[..., :n_value]


def windowed(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """A sliding window of W in O(L W) time and memory: chunks of queries over overlapping views of the keys.

    C queries in a row see W - 1 + C keys, all chunks under the same small mask. The first queries, whose
    window would begin before the first key, and what is left over at the end are computed apart.
    """
    assert mask.is_band
    assert mask.window is not None
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    n_value, n_query, reach = value.shape[-1], query.shape[1], mask.window - 1
    query, key, value = _of_one_width(query, key, value)
    past = key.shape[1] - n_query
    first = min(max(reach - past, 0), n_query)
    size = min(CHUNK, max(mask.window, CHUNK // 2))
    n_chunk, rest = divmod(n_query - first, size)

    def part(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        rule = Mask(n_query=queries.shape[1], n_key=keys.shape[1], window=mask.window)
        if pdrop and is_ours(queries):
            return blocked(queries, keys, values, rule.dense(), scale=scale, pdrop=pdrop)
        return sdpa(queries, keys, values, rule, scale=scale, pdrop=pdrop)

    parts = []
    if first:
        parts.append(part(query[:, :first], key[:, : past + first], value[:, : past + first]))
    if n_chunk:
        begin, end = past + first - reach, key.shape[1] - rest
        queries = _batch_beside_heads(query[:, first : n_query - rest]).unflatten(0, (n_chunk, size))
        keys, values = (
            _batch_beside_heads(t[:, begin:end]).unfold(0, reach + size, size).movedim(-1, 1)
            for t in (key, value)
        )
        together = part(queries, keys, values).flatten(0, 1)
        parts.append(together.unflatten(1, (len(query), -1)).transpose(0, 1))
    if rest:
        parts.append(
            part(*(t[:, -n:] for t, n in ((query, rest), (key, reach + rest), (value, reach + rest))))
        )
    return torch.cat(parts, dim=1)[..., :n_value]


def continued(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "B L H V"]:
    """L queries after a past of S - L keys, on CPU and without gradients.

    They see all of the past, which needs no mask, and the triangle among themselves; the two are joined by
    the logarithms of their softmaxes' denominators.
    """
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    n_value, past = value.shape[-1], key.shape[1] - query.shape[1]
    query, key, value = (t.transpose(1, 2) for t in _of_one_width(query, key, value))
    outputs, logarithms = [], []
    for rows, is_causal in ((slice(past), False), (slice(past, None), True)):
        output, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key[:, :, rows], value[:, :, rows], 0.0, is_causal, scale=scale
        )
        outputs.append(output)
        logarithms.append(logarithm)
    shares = torch.stack(logarithms).softmax(dim=0)[..., None].to(query.dtype)
    context = outputs[0] * shares[0] + outputs[1] * shares[1]
    return context.transpose(1, 2)[..., :n_value]


def _of_one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """All as wide as the widest, with zeros."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _batch_beside_heads(t: Float[Tensor, "B S K E"]) -> Float[Tensor, "S BK E"]:
    """Time first, so that it can be cut into chunks that overlap; a view where B is 1."""
    return t.transpose(0, 1).flatten(1, 2)
