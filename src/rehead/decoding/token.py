"""One decoding step: the new tokens, their rows in the caches, and what all layers compute from their positions."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention import LayerCache, visible
from rehead.attention.next_row import NextRow
from rehead.attention.rope import Rotary
from rehead.model.caches import counted


class Tables:
    """Cosines and sines of positions below `reach`, in tensors that live as long as the graph that reads them."""

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self._tables: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def at(self, rotary: Rotary, dtype: torch.dtype, positions: Int[Tensor, "B S"]) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of `positions`."""
        key = rotary, dtype
        if key not in self._tables:
            self._tables[key] = rotary.cos_sin(self.reach, dtype, positions.device)
        cos, sin = self._tables[key]
        return cos[positions], sin[positions]


class Token:
    """A new token of every sequence, at position `start`, or in sequence b at `positions[b]`.

    `rows` maps a cache's number of rows and window to the token's row in it. With `tables` all positions stay on the
    device, so a captured CUDA graph can be replayed for later positions.
    """

    def __init__(
        self,
        ids: Int[Tensor, " B"],
        caches: Sequence[LayerCache],
        rows: dict[tuple[int, int | None], NextRow],
        start: int = 0,
        positions: Int[Tensor, "B 1"] | None = None,
        tables: Tables | None = None,
    ) -> None:
        self.ids, self.caches, self.start, self.positions = ids, caches, start, positions
        self._rows, self._tables = rows, tables
        self._cos_sin: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._bias: dict[tuple[object, ...], Tensor] = {}

    def row(self, layer: int) -> NextRow:
        """Return the token's row in the cache of a layer."""
        cache = self.caches[layer]
        return self._rows[cache.n_rows, cache.window]

    def table_rows(self) -> Int[Tensor, " #B"]:
        """Return the token's rows in a table of position embeddings; padding takes row 0."""
        if self.positions is None:
            return torch.arange(self.start, self.start + 1, device=self.ids.device)
        return self.positions[:, 0].clamp(min=0)

    def cos_sin(self, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the token's position, for heads (B, H, E)."""
        key = rotary, dtype
        if key not in self._cos_sin:
            if self._tables is not None:
                assert self.positions is not None
                cos, sin = self._tables.at(rotary, dtype, self.positions)
            else:
                cos, sin = rotary.cos_sin(1, dtype, self.ids.device, self.positions, self.start)
            self._cos_sin[key] = cos[..., 0, :, :], sin[..., 0, :, :]  # of the one token
        return self._cos_sin[key]

    def key_cos_sin(self, rotary: Rotary, dtype: torch.dtype, layer: int) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the positions of a layer's rows, for keys (B, S, K, E)."""
        cache, row = self.caches[layer], self.row(layer)
        key = rotary, dtype, cache.n_rows, cache.window
        if key not in self._cos_sin:
            n_key, device = row.n_used, self.ids.device
            if self._tables is not None:  # row s holds the last position that is s modulo the number of rows
                assert self.positions is not None
                slots = torch.arange(n_key, device=device)
                last = self.positions - (self.positions - slots) % cache.n_rows  # negative for unused rows
                self._cos_sin[key] = self._tables.at(rotary, dtype, last.clamp(min=0))
            else:
                known = None if row.known is None else row.known[:, :n_key]
                if known is None and n_key < cache.length:
                    known = cache.row_positions(n_key)
                self._cos_sin[key] = rotary.cos_sin(n_key, dtype, device, known)
        return self._cos_sin[key]

    def bias(self, layer: int, n_head: int, dtype: torch.dtype) -> Float[Tensor, "BK 1 S"] | None:
        """Return the bias of `n_head` KV heads' scores: 0, minus infinity for hidden rows; None without positions."""
        if self.positions is None:
            return None
        cache, row = self.caches[layer], self.row(layer)
        key = cache.n_rows, cache.window, n_head, dtype
        if key not in self._bias:
            if row.known is None:  # rows beyond the position are unused; a full ring hides nothing
                unseen = (torch.arange(row.n_used, device=self.ids.device) > self.positions)[:, None]
            else:
                unseen = ~visible(self.positions, row.known[:, : row.n_used], cache.window)
            bias = torch.zeros_like(unseen, dtype=dtype).masked_fill_(unseen, float("-inf"))  # B 1 S
            self._bias[key] = bias[:, None].expand(-1, n_head, -1, -1).flatten(0, 1)
        return self._bias[key]


@contextmanager
def next_token(ids: Tensor, caches: Sequence[LayerCache], layers: Iterable[int]) -> Iterator[Token]:
    """Reserve and commit the rows of one more token of every sequence in the caches of `layers`; give the token.

    If the block fails, no cache has counted the token, and it can be decoded again.
    """
    start, positions = caches[0].length, caches[0].next(1)
    with counted(caches):
        rows: dict[tuple[int, int | None], NextRow] = {}
        for layer in layers:
            cache = caches[layer]
            key = cache.reserve_token(), cache.window
            if key not in rows:
                rows[key] = cache.next_row(positions)
            cache.commit(rows[key])
        yield Token(ids, caches, rows, start, positions)


def recorded_token(
    ids: Int[Tensor, " B"], positions: Int[Tensor, "B 1"], caches: Sequence[LayerCache], tables: Tables
) -> Token:
    """Return a token whose `ids` and `positions` are read at every replay; its rows must be committed before."""
    rows: dict[tuple[int, int | None], NextRow] = {}
    batch = torch.arange(len(ids), device=ids.device)
    for cache in caches:
        if (key := (cache.n_rows, cache.window)) not in rows:
            slots = positions[:, 0] % cache.n_rows
            rows[key] = NextRow((batch, slots), min(tables.reach, cache.n_rows))
    return Token(ids, caches, rows, positions=positions, tables=tables)


def stores(caches: Sequence[LayerCache]) -> list[Tensor]:
    """Return the rows of all layers."""
    return [store for cache in caches for store in cache.stores]


def is_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether both sequences hold the same tensor objects."""
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def widest(caches: Sequence[LayerCache]) -> LayerCache:
    """Return the cache with the most rows: if it has no gap, no cache has one."""
    return max(caches, key=lambda cache: cache.n_rows)


def is_gapless(cache: LayerCache) -> bool:
    """Whether the cache holds the last tokens of every sequence without a gap, so that positions define the mask."""
    if cache.positions is None:
        return True
    following = cache.next(1)
    assert following is not None
    held = cache.positions >= (following - cache.n_rows).clamp(min=0)  # not the stale rows of a ring
    return bool((held.sum(dim=1) == following[:, 0].clamp(max=cache.n_rows)).all())
