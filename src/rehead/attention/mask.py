"""Who may see whom, read from positions."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

EMPTY = -1
"""The position of padding, and of a cache row that holds nothing yet."""


def visible(
    query_positions: Int[Tensor, "#B L"],
    key_positions: Int[Tensor, "#B S"],
    window: int | None = None,
    *,
    causal: bool = True,
) -> Bool[Tensor, "B L S"]:
    """Which keys each query attends to: the past, itself, and no further back than the window.

    The rule reads positions, never indices, so training, chunked prefill, decoding, padding and a
    ring buffer with its rows out of order all share it. A window of W is W keys, the query's own
    included, as in Hugging Face (the CMU 10-423 homework counts w/2 + 1 of them). With `causal=False` only
    padding is hidden. What stands at `EMPTY` neither sees nor is seen.
    """
    seen = (query_positions != EMPTY)[:, :, None] & (key_positions != EMPTY)[:, None, :]
    if not causal:
        return seen
    distance = query_positions[:, :, None] - key_positions[:, None, :]
    seen = seen & (distance >= 0)
    return seen if window is None else seen & (distance < window)


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """The rule for one attention call: `n_query` queries over `n_key` keys.

    Without positions the keys stand at consecutive positions and the queries are the last
    `n_query` of them: a whole sequence, a chunk after its past, or one decoded token. Kernels that
    need no matrix ask `hides_nothing` or `is_causal_square`; the others take `dense`.
    """

    n_query: int
    n_key: int
    causal: bool = True
    window: int | None = None
    query_positions: Int[Tensor, "#B L"] | None = None
    key_positions: Int[Tensor, "#B S"] | None = None

    @property
    def hides_nothing(self) -> bool:
        """True where every query surely sees every key."""
        if self.query_positions is not None or self.key_positions is not None:
            return False
        return not self.causal or (self.n_query == 1 and (self.window is None or self.n_key <= self.window))

    @property
    def is_causal_square(self) -> bool:
        """True where the mask surely is the lower triangle, SDPA's `is_causal`."""
        narrow = self.window is not None and self.n_key > self.window
        return self._consecutive and not narrow and self.n_query == self.n_key

    @property
    def is_causal_chunk(self) -> bool:
        """True where each query surely sees all keys up to its own, and there are keys before the first query's."""
        narrow = self.window is not None and self.n_key > self.window
        return self._consecutive and not narrow and self.n_query < self.n_key

    @property
    def is_band(self) -> bool:
        """True where each query surely sees the last `window` keys up to its own."""
        return self._consecutive and self.window is not None

    @property
    def has_rule(self) -> bool:
        """True where sizes, `causal` and `window` say all: no positions were given."""
        return self._consecutive or (not self.causal and self.hides_nothing)

    @property
    def _consecutive(self) -> bool:
        """Causal, and the queries stand at the last places of the keys."""
        given = self.query_positions is not None or self.key_positions is not None
        return self.causal and not given and self.n_query <= self.n_key

    def dense(self, device: torch.device | str = "cpu") -> Bool[Tensor, "B L S"] | None:
        """The mask as a matrix, True where visible; None where nothing is hidden."""
        if self.hides_nothing:
            return None
        key, query = self.key_positions, self.query_positions
        if key is None:
            key = torch.arange(self.n_key, device=device)[None]
        if query is None:
            first = self.n_key - self.n_query if self.causal else 0
            query = torch.arange(first, first + self.n_query, device=device)[None]
        return visible(query, key, self.window, causal=self.causal)
