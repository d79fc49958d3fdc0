"""Which keys a query may attend to, computed from positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

EMPTY = -1
"""The position of unused cache rows, and of padding, which may have any negative one."""


def reach(positions: Int[Tensor, "B L"]) -> int:
    """Return one more than the largest position; 0 if there is none."""
    return int(positions.max()) + 1 if positions.numel() else 0


def visible(
    query_positions: Int[Tensor, "#B L"],
    key_positions: Int[Tensor, "#B S"],
    window: int | None = None,
    *,
    causal: bool = True,
) -> Bool[Tensor, "B L S"]:
    """The keys that each query attends to: the past and itself, no further back than the window reaches.

    The rule reads positions, never indices, so training, chunked prefill, decoding, padding and a
    ring buffer with its rows out of order all share it. A window of W is W keys, the query's own
    included, as in Hugging Face (document B in docs/sources.md counts w/2 + 1). With `causal=False` only
    padding is hidden. A token at a negative position neither sees nor is seen.
    """
    seen = (query_positions >= 0)[:, :, None] & (key_positions >= 0)[:, None, :]
    if not causal:
        return seen
    query, key = query_positions[:, :, None], key_positions[:, None, :]
    query, key = query.long(), key.long()  # a window may not fit into int8
    seen &= key <= query  # comparisons need no matrix of distances, eight times as large
    return seen if window is None else seen.logical_and_(key > query - window)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """The mask of one attention call: `n_query` queries over `n_key` keys.

    Without positions the keys are at consecutive positions and the queries are the last
    `n_query` of them: a whole sequence, a chunk after its past, or one decoded token. Kernels that
    need no matrix use the properties, such as `is_causal_square`; the others use `dense`.
    """

    n_query: int
    n_key: int
    causal: bool = True
    window: int | None = None
    query_positions: Int[Tensor, "#B L"] | None = None
    key_positions: Int[Tensor, "#B S"] | None = None

    @property
    def hides_nothing(self) -> bool:
        """True if every query is known to see every key."""
        if self.query_positions is not None or self.key_positions is not None:
            return False
        return not self.causal or (self.n_query == 1 and (self.window is None or self.n_key <= self.window))

    @property
    def is_causal_square(self) -> bool:
        """True if the mask is known to be the lower triangle, SDPA's `is_causal`."""
        narrow = self.window is not None and self.n_key > self.window
        return self._consecutive and not narrow and self.n_query == self.n_key

    @property
    def is_causal_chunk(self) -> bool:
        """True if each query is known to see all keys up to its own, and the first query has a past."""
        narrow = self.window is not None and self.n_key > self.window
        return self._consecutive and not narrow and self.n_query < self.n_key

    @property
    def is_band(self) -> bool:
        """True if each query is known to see the last `window` keys up to its own."""
        return self._consecutive and self.window is not None

    @property
    def has_rule(self) -> bool:
        """True if sizes, `causal` and `window` determine the mask, because no positions were given."""
        return self._consecutive or (not self.causal and self.hides_nothing)

    @property
    def _consecutive(self) -> bool:
        """True for a causal mask whose queries are known to be the last of the keys."""
        given = self.query_positions is not None or self.key_positions is not None
        return self.causal and not given and self.n_query <= self.n_key

    def dense(self, device: torch.device | str = "cpu") -> Bool[Tensor, "B L S"] | None:
        """The mask as a matrix, True where a key is visible; None if nothing is hidden."""
        if self.hides_nothing:
            return None
        key, query = self.key_positions, self.query_positions
        if key is None:
            key = torch.arange(self.n_key, device=device)[None]
        if query is None:
            first = self.n_key - self.n_query if self.causal else 0
            query = torch.arange(first, first + self.n_query, device=device)[None]
        return visible(query, key, self.window, causal=self.causal)
