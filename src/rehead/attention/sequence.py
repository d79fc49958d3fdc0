"""Attention of many queries by rehead's own C++ (native/sequence.cpp), with gradients, windows and dropped weights.

In float32 on a CPU, where there is a compiler. Little of what a mask hides is computed; weights are held a tile at a
time, and the backward pass makes them anew, from the numbers drawn where weights were dropped.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.dropout import raw_draw, threshold
from rehead.attention.mask import Mask
from rehead.native import sequence as native

WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Types whose numbers are computed as float32."""

TILE = 32
"""Queries that a thread takes at a time, as in sequence.cpp."""
LONGEST = 4096
"""Keys without a window up to which it is faster than PyTorch's flash attention; measured, docs/log.md."""


def refuses(query: Tensor, key: Tensor, value: Tensor, mask: Mask, pdrop: float) -> str | None:
    """Why these arguments cannot go this way or, as measured, should not; None where they go."""
    tensors = query, key, value
    if not mask.has_rule:
        return "positions are given"
    if query.dtype not in WIDENED or any(t.dtype != query.dtype for t in tensors):
        return "not in float32, bfloat16 or float16"
    if any(len(t) != len(query) for t in tensors):
        return "keys are shared by several sequences"
    if any(not t.numel() for t in tensors):
        return "nothing to compute"
    unserved = native.refuses(*tensors)
    if unserved is not None or pdrop > 0:  # threads must not decide which weights are dropped
        return unserved
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    n_task = len(key) * key.shape[2] * (1 if learns else -(-query.shape[1] // TILE))
    if n_task < torch.get_num_threads():
        return "less work than threads"
    if not _window(mask) and mask.n_key > LONGEST:
        return "too many keys, without a window"
    return None


def _window(mask: Mask) -> int:
    """Keys that a query sees, 0 where that is all up to its own."""
    return mask.window if mask.window is not None and mask.window < mask.n_key else 0


def sequence(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """The reference, for arguments that `refuses` lets through.

    Without a window weights are dropped by the draws of `blocked`, if its blocks are of whole words.
    """
    window, draws = _window(mask), None
    if pdrop:
        batch, n_query, n_head, _ = query.shape
        draws = raw_draw((batch, n_head, n_query, window or mask.n_key))
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    q, k, v = query.float(), key.float(), value.float()
    gathered = native.attend(q, k, v, draws, mask.causal, window, threshold(pdrop), scale)
    return gathered.to(query.dtype)
