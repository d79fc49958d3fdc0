"""A sliding window of W in O(L W) time and memory, by kernels that know no windows."""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.kernels.blocked import Blocked
from rehead.attention.kernels.sdpa import SDPA, of_one_width
from rehead.attention.mask import Mask

LONG = 512
"""Keys from which chunks are faster than one call under a mask (measured, docs/log.md)."""
CHUNK = 64
"""Queries that are computed together at most (measured, docs/log.md)."""
PARTS = (Blocked(), SDPA())
"""The kernels of a chunk, in the order of preference."""


def window_limit(mask: Mask) -> str | None:
    """Why a window is not worth, or not open to, a kernel of its own; None where it is."""
    if not mask.is_band:
        return "no window, or positions are given"
    return None if mask.n_key >= max(LONG, 2 * (mask.window or 0)) else "few keys"


class Windowed(Kernel):
    """Chunks of queries over overlapping views of the keys.

    C queries in a row see W - 1 + C keys, all chunks under the same small mask. The first queries, whose
    window would begin before the first key, and what is left over at the end are computed apart.
    """

    name = "windowed"
    words = "chunks of the window"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """See `Kernel.limit`."""
        return window_limit(call.mask)

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """See `Kernel.run`."""
        window, n_query = call.mask.window, call.query.shape[1]
        assert call.mask.is_band
        assert window is not None
        reach = window - 1
        query, key, value = of_one_width(call.query, call.key, call.value)
        past = key.shape[1] - n_query
        first = min(max(reach - past, 0), n_query)
        size = min(CHUNK, max(window, CHUNK // 2))
        n_chunk, rest = divmod(n_query - first, size)

        def part(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            rule = Mask(n_query=queries.shape[1], n_key=keys.shape[1], window=window)
            chunk = Call(queries, keys, values, rule, call.scale, None, call.pdrop)
            return next(kernel for kernel in PARTS if kernel.refuses(chunk) is None).run(chunk)

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
            parts.append(part(query[:, -rest:], *(t[:, -(reach + rest) :] for t in (key, value))))
        return torch.cat(parts, dim=1)[..., : call.value.shape[-1]]


def _batch_beside_heads(t: Float[Tensor, "B S K E"]) -> Float[Tensor, "S BK E"]:
    """Time first, so that it can be cut into chunks that overlap; a view where B is 1."""
    return t.transpose(0, 1).flatten(1, 2)
