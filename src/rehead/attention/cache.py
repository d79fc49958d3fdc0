"""The KV cache of one layer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention.mask import EMPTY, reach
from rehead.attention.next_row import NextRow
from rehead.attention.selection import selected
from rehead.attention.taken_back import TakenBack
from rehead.errors import UsageError

FIRST_ROWS = 64
"""Initial number of rows of a growing cache, which doubles when it is full."""
Count = tuple[int, int, bool, Tensor | None]


class LayerCache:
    """Named rows, one per token, and the position of each.

    A variant defines the rows of a token (`AttentionConfig.cache_rows`). The cache allocates `capacity`
    rows at once; without a capacity it grows by doubling. With a `window` (not above `capacity`) it is a
    ring buffer of that many rows, in which the newest token overwrites the oldest.

    In arguments and results time is axis 1, (B, S, ...). Internally it is the last axis but one, (B, K, S, E),
    so that the keys of a head are contiguous; results are views. A chunk longer than one token reads
    the ring before it writes, so a window of W never needs more than W rows.

    Tokens are taken back by setting `count`, or overwritten by giving their positions again; in a full ring only the
    newest one, since the others have overwritten what they saw.
    """

    def __init__(
        self,
        rows: dict[str, tuple[int, ...]],
        *,
        batch_size: int,
        capacity: int | None = None,
        window: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.batch_size, self.capacity, self.window = dict(rows), batch_size, capacity, window
        limits = [limit for limit in (capacity, window) if limit is not None]
        self._n_rows = min(limits) if limits else 0
        self._store = {
            name: torch.zeros(batch_size, *shape[:-1], self._n_rows, shape[-1], dtype=dtype, device=device)
            for name, shape in rows.items()
        }
        self._in_ring_order = False
        self.length = 0
        """Number of tokens seen, while it is the same for every sequence of the batch."""
        self.positions: Int[Tensor, "B S"] | None = None
        """The position of each row, once positions were given; None while they are consecutive."""
        self._furthest = 0  # the largest position + 1
        self._taken_back = TakenBack(window if self._n_rows == window else None)

    @property
    def n_rows(self) -> int:
        """Number of rows allocated now."""
        return self._n_rows

    @property
    def is_full(self) -> bool:
        """True if the next token makes the cache allocate more rows."""
        return self.capacity is None and self.window is None and self.n_token >= self._n_rows

    @property
    def n_bytes(self) -> int:
        """Bytes allocated for the rows; the positions are not counted."""
        return sum(store.nbytes for store in self._store.values())

    def next(self, n_token: int) -> Int[Tensor, "B L"] | None:
        """Positions of the next `n_token` tokens; None while these are `length`, `length` + 1, ... for all."""
        if self.positions is None:
            return None
        last = self.positions.max(dim=1, keepdim=True).values
        return last + torch.arange(1, n_token + 1, device=last.device)

    def append(
        self, positions: Int[Tensor, "#B L"] | None = None, **new: Tensor
    ) -> tuple[dict[str, Tensor], Int[Tensor, "B S"] | None]:
        """Store new rows, (B, L, ...) each; return all rows that may be visible, and their positions.

        The rows returned have the dtype of the new ones. The positions are None if a `Mask` needs none:
        the rows are consecutive and end with the new ones, or they are exactly the window of one new token.
        """
        assert new.keys() == self._store.keys(), f"expected rows {list(self._store)}, got {list(new)}"
        n_token = next(iter(new.values())).shape[1]
        inside = {name: row.movedim(1, -2).to(self._store[name].dtype) for name, row in new.items()}
        given = self.next(n_token) if positions is None else positions
        if given is None:
            rows, row_positions = self._append_consecutive(inside, n_token), None
        else:
            rows, row_positions = self._append_anywhere(inside, given.long().expand(self.batch_size, -1))
        return {name: row.to(new[name].dtype) for name, row in rows.items()}, row_positions

    @property
    def n_token(self) -> int:
        """Number of tokens of the longest sequence."""
        return self.length if self.positions is None else self._furthest

    def next_row(self, positions: Int[Tensor, "B 1"] | None) -> NextRow:
        """Return the row for the tokens at `positions`. Call it after `reserve_token`, with an earlier `next(1)`."""
        if positions is None:
            return NextRow((self.length - 1) % self._n_rows, min(self.length, self._n_rows))
        known, slots = self._known_positions(), positions % self._n_rows
        batch = torch.arange(len(slots), device=slots.device)
        n_used = min(self._n_rows, self._furthest)
        return NextRow((batch, slots[:, 0]), n_used, known.scatter(1, slots, positions))

    def reserve_token(self) -> int:
        """Make room for one more token of every sequence and count it; return the number of rows."""
        if self.positions is None:
            self._reserve(self.length + 1)
            self.length += 1
        else:
            self._reserve(self._furthest + 1)
            self._furthest += 1
        return self._n_rows

    @property
    def count(self) -> Count:
        """What reading tokens changes; set to an earlier value, it takes back those counted since."""
        return self.length, self._furthest, self._in_ring_order, self.positions

    @count.setter
    def count(self, count: Count) -> None:
        self.take_back(count)

    def take_back(self, count: Count, given: Int[Tensor, "#B L"] | None = None) -> None:
        """Set `count` to what it was before a call that failed, which may have written at `given` positions."""
        before, wrote = self._newest(), self.positions is not count[3]
        self.length, self._furthest, self._in_ring_order, self.positions = count
        after, again = self._newest(), given.cpu() if wrote and given is not None else torch.tensor([[-1]])
        rewritten = bool(((again >= 0) & (again <= after[:, None])).any())
        self._taken_back.note(before, after, rewritten=rewritten)

    def _newest(self) -> Int[Tensor, " #B"]:
        """The position of the newest token of every sequence, -1 if there is none."""
        if self.positions is None:
            return torch.tensor([self.length - 1])
        return self.positions.cpu().amax(1)

    def commit(self, row: NextRow) -> None:
        """Record which positions the rows hold, the token in `row` included; its numbers may be written later."""
        if row.known is None:
            self._in_ring_order = self.length > self._n_rows
        else:
            self.positions = row.known

    def write_token(self, name: str, row: NextRow, new: Float[Tensor, "B K _"]) -> None:
        """Write the row `name` of one token of every sequence; a row without heads is passed as one head."""
        self._write(name, row.slot, new if len(self.rows[name]) > 1 else new.squeeze(1))

    def rows_until(self, name: str, n_row: int) -> Float[Tensor, "BK S _"]:
        """The first `n_row` rows of every head."""
        return self._store[name].flatten(0, -3).narrow(1, 0, n_row)

    @property
    def stores(self) -> list[Float[Tensor, "B ... S _"]]:
        """The tensors of the rows, (B, K, S, E) or (B, S, R); growing and `select_batch` replace them."""
        return list(self._store.values())

    def select_batch(self, rows: Tensor | Sequence[int | bool]) -> None:
        """Replace sequence i by sequence `rows[i]`, or keep those whose `rows` are True; a batch may grow or shrink."""
        rows = selected(rows, self.batch_size)
        self._taken_back.select(rows.cpu(), self.batch_size)
        self._store = {name: store[rows] for name, store in self._store.items()}
        if self.positions is not None:
            self.positions = self.positions[rows]
            self._furthest = int(self.positions.max()) + 1 if len(rows) else 0
        self.batch_size = len(rows)

    def row_positions(self, n_row: int) -> Int[Tensor, "1 S"]:
        """Positions of the `n_row` rows that `append` returned last, when it returned None as their positions."""
        slots = torch.arange(n_row, device=self.device)
        if self.length > n_row == self._n_rows and self._in_ring_order:
            return (self.length - 1 - (self.length - 1 - slots) % n_row)[None]
        return (slots + self.length - n_row)[None]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows."""
        return next(iter(self._store.values())).dtype

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return next(iter(self._store.values())).device

    def _append_consecutive(self, new: dict[str, Tensor], n_token: int) -> dict[str, Tensor]:
        start = self.length
        self._reserve(start + n_token)  # first: a refusal changes nothing
        self.length += n_token
        if self.length <= self._n_rows:  # nothing is overwritten
            for name, row in new.items():
                self._write(name, slice(start, self.length), row)
            self._in_ring_order = False
            return {name: store[..., : self.length, :].movedim(-2, 1) for name, store in self._store.items()}
        if n_token == 1:  # the whole ring is the window of the new token
            for name, row in new.items():
                self._write(name, start % self._n_rows, row.squeeze(-2))
            self._in_ring_order = True
            return {name: store.movedim(-2, 1) for name, store in self._store.items()}
        device = self.device
        past = torch.arange(max(0, start - self._n_rows + 1), start, device=device) % self._n_rows
        rows = {name: torch.cat([store[..., past, :], new[name]], -2) for name, store in self._store.items()}
        kept = min(n_token, self._n_rows)
        slots = torch.arange(self.length - kept, self.length, device=device) % self._n_rows
        for name, row in new.items():
            self._write(name, slots, row[..., -kept:, :])
        self._in_ring_order = False
        return {name: row.movedim(-2, 1) for name, row in rows.items()}

    def _append_anywhere(
        self, new: dict[str, Tensor], positions: Int[Tensor, "B L"]
    ) -> tuple[dict[str, Tensor], Int[Tensor, "B S"]]:
        furthest = max(self.length, self._furthest, reach(positions))
        self._reserve(max(furthest, 1))  # first: a refusal changes nothing
        known = self._known_positions()
        past, keep = None, positions >= 0
        if self._n_rows == self.window and positions.numel():
            self.require_kept(positions)
            newest = torch.maximum(known.max(1).values, positions.max(1).values)[:, None]
            late = keep & (positions <= newest - self._n_rows)  # their rows hold newer tokens
            keep = keep & ~late
            if positions.shape[1] > 1 or bool(late.any()):  # read before overwriting
                past = known, {name: store.clone() for name, store in self._store.items()}
        self._furthest = furthest
        batch, token = keep.nonzero(as_tuple=True)
        slots = positions[batch, token] % self._n_rows
        self.positions = known.index_put((batch, slots), positions[batch, token])
        for name, row in new.items():
            self._write(name, (batch, slots), row.movedim(-2, 1)[batch, token])
        if past is None:
            used = min(self._n_rows, furthest)
            rows = {name: store[..., :used, :].movedim(-2, 1) for name, store in self._store.items()}
            return rows, self.positions[:, :used]
        rows = {name: torch.cat([store, new[name]], -2).movedim(-2, 1) for name, store in past[1].items()}
        return rows, torch.cat([past[0], positions], dim=1)

    def require_kept(self, positions: Int[Tensor, "#B L"]) -> None:
        """Refuse tokens whose window the ring no longer has: those before the newest one, once it is full."""
        if self._n_rows == self.window:
            self._taken_back.require(positions.cpu(), self._newest())

    def _known_positions(self) -> Int[Tensor, "B S"]:
        """The position of every row, `EMPTY` if unused."""
        if self.positions is None:
            slots = torch.arange(self._n_rows, device=self.device)
            held = self.length - 1 - (self.length - 1 - slots) % max(self._n_rows, 1)
            known = torch.where(held >= 0, held, EMPTY)
            return known.expand(self.batch_size, -1)
        grown = self._n_rows - self.positions.shape[1]
        return torch.nn.functional.pad(self.positions, (0, grown), value=EMPTY)

    def _write(self, name: str, slots: int | slice | Tensor | tuple[Tensor, Tensor], new: Tensor) -> None:
        """Write rows to one or several slots of every sequence, or to pairs (sequence, slot)."""
        store = self._store[name]
        if isinstance(slots, int):
            store.select(-2, slots).copy_(new)
        elif isinstance(slots, tuple):
            store.movedim(-2, 1)[slots] = new
        else:
            store[..., slots, :] = new

    def require_room(self, length: int) -> None:
        """Refuse `length` positions beyond the capacity, unless a window keeps the last of them only."""
        if self.capacity is not None and length > self.capacity and self._n_rows != self.window:
            raise UsageError(
                f"the KV cache holds capacity={self.capacity} tokens and was given {length}: "
                f"build it with capacity={length} or more, or without one to let it grow."
            )

    def _reserve(self, length: int) -> None:
        """Make room for `length` positions. Raises UsageError beyond the capacity, and after tokens were lost."""
        if self._taken_back:
            newest = self._newest()
            self._taken_back.require((newest + 1)[:, None], newest)
        self.require_room(length)
        if self.capacity is None and self.window is None and length > self._n_rows:
            n_rows, grown = max(length, 2 * self._n_rows, FIRST_ROWS), {}
            for name, store in self._store.items():
                grown[name] = store.new_zeros(*store.shape[:-2], n_rows, store.shape[-1])
                grown[name][..., : store.shape[-2], :] = store
            self._store, self._n_rows = grown, n_rows  # together: without memory for all, nothing has changed
