"""A moment that is recorded once and replayed for every later token: nothing in it is a number of the host.

A CUDA graph repeats the same kernels with the same arguments. So positions are a tensor, which somebody fills before
each replay, and shapes follow from `reach`, a number of tokens that is reached later, if at all. For caches without
gaps: there a position says which rows are seen.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention.cache import LayerCache
from rehead.attention.rope import Rotary
from rehead.attention.step import Moment

Tables = dict[tuple[object, ...], tuple[Tensor, Tensor]]
"""Cosines and sines of positions 0, 1, ...: a record reads them, so they live as long as it."""


class Fixed(Moment):
    """Each row stands at its own of `positions`, (B, 1), all below `reach`; so many rows of a cache are looked at.

    Its caches have made room before, and are told of the new token by others.
    """

    def __init__(self, positions: Int[Tensor, "B 1"], reach: int, tables: Tables) -> None:
        super().__init__(0, positions)
        self.reach, self.tables = reach, tables
        self._slots: dict[int, Tensor] = {}

    def turn_keys(
        self, rotary: Rotary, key: Float[Tensor, "B S K E"], cache: LayerCache
    ) -> Float[Tensor, "B S K E"]:
        """See `Moment.turn_keys`. Row s holds the last position that is s modulo the rows there is room for."""
        n_key = key.shape[1]
        whole = rotary.config, rotary.width, key.dtype, cache.n_rows, n_key
        if whole not in self._turns:
            assert self.positions is not None
            rows = torch.arange(n_key, device=key.device)
            standing = self.positions - (self.positions - rows) % cache.n_rows  # below 0 where nothing is yet
            self._turns[whole] = self._read(rotary, key, standing.clamp(min=0))
        return rotary.apply(key, *self._turns[whole])

    def remember(self, cache: LayerCache, **new: Tensor) -> list[Float[Tensor, "BK S _"]]:
        """Store the new token's rows, (B, ...) each; the rows up to `reach`, in the cache's order."""
        assert self.positions is not None
        if cache.n_rows not in self._slots:
            self._slots[cache.n_rows] = self.positions[:, 0] % cache.n_rows
        cache.write_one(self._slots[cache.n_rows], **new)
        return cache.first(self._n_row(cache))

    def hidden(self, cache: LayerCache, n_head: int, dtype: torch.dtype) -> Float[Tensor, "BK 1 S"]:
        """See `Moment.hidden`: rows beyond the position hold nothing yet; a full ring hides nothing."""
        n_row = self._n_row(cache)
        key = n_row, n_head, dtype
        if key not in self._hidden:
            assert self.positions is not None
            unseen = torch.arange(n_row, device=self.positions.device) > self.positions  # B S
            bias = torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, float("-inf"))
            self._hidden[key] = bias[:, None, None].expand(-1, n_head, -1, -1).flatten(0, 1)
        return self._hidden[key]

    def _n_row(self, cache: LayerCache) -> int:
        return min(self.reach, cache.n_rows)

    def _own_turns(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.positions is not None
        return self._read(rotary, x, self.positions)

    def _read(self, rotary: Rotary, x: Tensor, positions: Int[Tensor, "B S"]) -> tuple[Tensor, Tensor]:
        """Turns of these positions, from a table of all."""
        key = rotary.config, rotary.width, x.dtype
        if key not in self.tables:
            self.tables[key] = rotary.turns(self.reach, x.dtype, x.device)
        cos, sin = self.tables[key]
        return cos[positions], sin[positions]
