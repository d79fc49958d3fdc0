"""A sliding window of W in O(L W) time and memory, with kernels that do not support windows."""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.kernels.blocked import Blocked
from rehead.attention.kernels.sdpa import SDPA, of_one_width
from rehead.attention.mask import Mask

LONG = 512
"""Number of keys from which chunks are faster than one masked call (measured, docs/log.md)."""
CHUNK = 64
"""Maximum number of queries per chunk (measured, docs/log.md)."""
PARTS = (Blocked(), SDPA())
"""The kernels for a chunk, in order of preference."""


def window_limit(call: Call) -> str | None:
    """Return the reason against a kernel for windows; None if one applies."""
    mask = call.mask
    if not mask.is_band:
        return "no window, or positions are given"
    if len(call.key) != len(call.query):
        return "keys are shared by several sequences"
    return None if mask.n_key >= max(LONG, 2 * (mask.window or 0)) else "few keys"


class Windowed(Kernel):
    """Chunks of queries over overlapping views of the keys.

    C consecutive queries see W - 1 + C keys, with the same small mask in every chunk. The first queries, whose
    window would begin before the first key, and the remainder at the end are computed separately.
    """

    name = "windowed"
    words = "chunks of the window"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """Refuse calls without a window, and those with few keys."""
        return window_limit(call)

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the chunks in one batch."""
        window, n_query = call.mask.window, call.query.shape[1]
        assert call.mask.is_band
        assert window is not None
        reach = window - 1
        query, key, value = of_one_width(call.query, call.key, call.value)
        past = key.shape[1] - n_query
        first = min(max(reach - past, 0), n_query)
        size = min(CHUNK, max(window, CHUNK // 2))
        n_chunk, rest = divmod(n_query - first, size)

        def attend_chunk(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            rule = Mask(n_query=queries.shape[1], n_key=keys.shape[1], window=window)
            chunk = Call(queries, keys, values, rule, call.scale, None, call.pdrop)
            return next(kernel for kernel in PARTS if kernel.refuses(chunk) is None).run(chunk)

        parts = []
        if first:
            parts.append(attend_chunk(query[:, :first], key[:, : past + first], value[:, : past + first]))
        if n_chunk:
            begin, end = past + first - reach, key.shape[1] - rest
            queries = _batch_beside_heads(query[:, first : n_query - rest]).unflatten(0, (n_chunk, size))
            keys, values = (
                _batch_beside_heads(t[:, begin:end]).unfold(0, reach + size, size).movedim(-1, 1)
                for t in (key, value)
            )
            context = attend_chunk(queries, keys, values).flatten(0, 1)
            parts.append(context.unflatten(1, (len(query), -1)).transpose(0, 1))
        if rest:
            parts.append(attend_chunk(query[:, -rest:], *(t[:, -(reach + rest) :] for t in (key, value))))
        return torch.cat(parts, dim=1)[..., : call.value.shape[-1]]


def _batch_beside_heads(t: Float[Tensor, "B S K E"]) -> Float[Tensor, "S BK E"]:
    """Move time to axis 0, so that it can be cut into overlapping chunks; a view if B is 1."""
    return t.transpose(0, 1).flatten(1, 2)
