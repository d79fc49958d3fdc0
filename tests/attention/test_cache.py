"""A cache of tokens whose content is their own position: what each query may see is then read off the rows."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rehead.attention import cache as cache_module
from rehead.attention.cache import FIRST_ROWS, LayerCache
from rehead.attention.mask import EMPTY, Mask
from rehead.errors import UsageError

ROWS = {"key": (2, 3), "latent": (5,)}
B, T = 4, 23


def tokens(start, stop, batch=B):
    """Rows of tokens start .. stop - 1, every number of which is the token's position."""
    at = torch.arange(start, stop, dtype=torch.float64)
    return {n: at.view(1, -1, *[1] * len(s)).expand(batch, -1, *s).contiguous() for n, s in ROWS.items()}


def make(kind=LayerCache, window=None, capacity=None, batch=B):
    return kind(ROWS, batch_size=batch, window=window, capacity=capacity, dtype=torch.float64)


def seen_by_each(cache, cuts, window, given="none"):
    """For every token, in chunks ending at `cuts`, the contents its query sees, in order."""
    seen = []
    for start, stop in pairwise([0, *cuts]):
        positions = torch.arange(start, stop)[None] if given != "none" else None
        if given == "rows":
            positions = positions.expand(B, -1)
        rows, key_positions = cache.append(positions, **tokens(start, stop))
        assert all(torch.equal(row, row.flatten(2)[..., :1].view(B, -1, *[1] * len(ROWS[n])).expand_as(row))
                   for n, row in rows.items())  # fmt: skip
        content = rows["latent"][..., 0].long()
        assert torch.equal(rows["key"][..., 0, 0].long(), content)
        n_row = content.shape[1]
        if key_positions is None:
            assert torch.equal(cache.row_positions(n_row).expand(B, -1), content)
        mask = Mask(n_query=stop - start, n_key=n_row, window=window,
                    query_positions=positions, key_positions=key_positions)  # fmt: skip
        dense = mask.dense()
        if dense is None:
            dense = torch.ones(1, stop - start, n_row, dtype=torch.bool)
        dense = dense.expand(B, -1, -1)
        for i in range(stop - start):
            lists = [sorted(content[b][dense[b, i]].tolist()) for b in range(B)]
            assert lists == lists[:1] * B
            seen.append(lists[0])
    return seen


def check(cache, cuts, window, given="none"):
    wanted = [list(range(max(0, t - window + 1) if window else 0, t + 1)) for t in range(cuts[-1])]
    assert seen_by_each(cache, cuts, window, given) == wanted


@pytest.mark.parametrize("given_positions", ["none", "one row", "rows"])
@given(
    cuts=st.sets(st.integers(1, T - 1)).map(lambda cuts: [*sorted(cuts), T]),
    window=st.none() | st.integers(1, T + 3),
    capacity=st.none() | st.integers(T, T + 5),
)
def test_every_query_sees_its_past(given_positions, cuts, window, capacity):
    check(make(window=window, capacity=capacity), cuts, window, given_positions)


class Stale(LayerCache):
    """Counts one token too few."""

    def append(self, positions=None, **new):
        out = super().append(positions, **new)
        self.length -= 1
        return out


class WritesFirst(LayerCache):
    """A chunk overwrites the ring before its first queries have read it."""

    def _append_consecutive(self, new, n_token):
        rows = {}
        for i in range(n_token):
            rows = super()._append_consecutive({n: row[..., i : i + 1, :] for n, row in new.items()}, 1)
        return rows


class OutOfStep(LayerCache):
    """The ring's newest row lands one slot late."""

    def _write(self, name, slots, new):
        late = slots if isinstance(slots, slice | tuple) else (slots + 1) % self._n_rows
        super()._write(name, late, new)


def test_broken_caches_are_caught():
    cases = [([*range(1, T + 1)], 5), ([7, 9, 16, T], 5), ([T], 5), ([3, 4, 14, T], 6)]

    def check_all(kind=LayerCache, off=0, given="none"):
        for cuts, window in cases:
            check(make(kind, window=window + off), cuts, window, given)

    check_all()
    for kind in (Stale, WritesFirst, OutOfStep):
        with pytest.raises(AssertionError):
            check_all(kind)
    for given_positions in ("none", "rows"):
        with pytest.raises(AssertionError):
            check_all(off=-1, given=given_positions)  # a ring one row short


@given(lengths=st.lists(st.integers(0, 9), min_size=B, max_size=B), window=st.none() | st.integers(1, 11))
def test_ragged_batch(lengths, window):
    """After a right-padded chunk every sequence goes on from its own length."""
    cache = make(window=window)
    at = torch.arange(9)[None].expand(B, -1)
    positions = torch.where(at < torch.tensor(lengths)[:, None], at, EMPTY)
    cache.append(positions, **tokens(0, 9))
    for step in range(4):
        here = torch.tensor(lengths)[:, None] + step
        assert torch.equal(cache.next(1), here)
        new = {n: here.view(B, 1, *[1] * len(s)).expand(-1, -1, *s).double() for n, s in ROWS.items()}
        rows, key_positions = cache.append(**new)
        content = rows["key"][..., 0, 0].long()
        dense = Mask(
            n_query=1,
            n_key=content.shape[1],
            window=window,
            query_positions=here,
            key_positions=key_positions,
        ).dense()
        for b, n in enumerate(here[:, 0].tolist()):
            wanted = list(range(max(0, n - window + 1) if window else 0, n + 1))
            assert sorted(content[b][dense[b, 0]].tolist()) == wanted


@given(order=st.permutations(range(9)), window=st.none() | st.integers(1, 11))
def test_order_within_a_chunk_does_not_matter(order, window):
    """The newest tokens stay, wherever they stood in the chunk."""
    cache, positions = make(window=window), torch.tensor(order)[None]
    cache.append(positions, **{name: row[:, order] for name, row in tokens(0, 9).items()})
    rows, key_positions = cache.append(**tokens(9, 10))
    content = rows["latent"][0, :, 0].long()
    here = torch.full((B, 1), 9)
    seen = Mask(
        n_query=1, n_key=len(content), window=window, query_positions=here, key_positions=key_positions
    ).dense()[0, 0]
    assert sorted(content[seen].tolist()) == list(range(max(0, 10 - window) if window else 0, 10))


def test_a_full_ring_refuses_an_old_token():
    """What it sees is overwritten. The newest one may be given again."""
    cache = make(window=5)
    cache.append(torch.arange(10)[None], **tokens(0, 10))
    for at in ([3], [8, 10], [8, 9]):
        with pytest.raises(
            UsageError, match="overwritten what an earlier token sees: read the text with a new"
        ):
            cache.append(torch.tensor([at]), **tokens(0, len(at)))
    assert cache.n_token == 10
    rows, positions = cache.append(torch.tensor([[9]]), **tokens(9, 10))
    assert sorted(rows["latent"][0, :, 0].tolist()) == sorted(positions[0].tolist()) == [5, 6, 7, 8, 9]
    made = make(window=5)
    made.append(torch.arange(4)[None], **tokens(0, 4))
    made.append(torch.tensor([[1, 2]]), **tokens(1, 3))  # nothing is overwritten yet


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    ("window", "read", "back", "keeps"),
    [
        (None, 10, 4, True),
        (5, 10, 1, True),
        (5, 10, 2, False),
        (5, 10, 10, True),
        (5, 5, 4, True),
        (5, 6, 2, False),
    ],
)
def test_tokens_are_taken_back(window, read, back, keeps, given):
    """A ring has no longer what they overwrote, and says so at the next token."""
    cache = make(window=window)
    begun = torch.arange(read - back)[None].expand(B, -1) if given else None
    start = cache.count
    if back < read:
        cache.append(begun, **tokens(0, read - back))
        start = cache.count
    cache.append(
        torch.arange(read - back, read)[None].expand(B, -1) if given else None, **tokens(50, 50 + back)
    )
    cache.count = start
    if not keeps:
        for _ in range(2):
            with pytest.raises(UsageError, match="overwritten what an earlier token sees"):
                cache.append(**tokens(read - back, read))
        return
    rows, known = cache.append(**tokens(read - back, read))
    content = rows["latent"][0, :, 0].long()
    mask = Mask(n_query=back, n_key=len(content), window=window, key_positions=known,
                query_positions=None if known is None else torch.arange(read - back, read)[None])  # fmt: skip
    seen = torch.ones(back, len(content), dtype=torch.bool) if (dense := mask.dense()) is None else dense[0]
    first = 0 if window is None else max(0, read - window)
    assert sorted(content[seen[-1]].tolist()) == list(range(first, read))


def test_what_was_taken_back_one_by_one_is_overwritten_all_the_same():
    """Each step alone would be none; nor is the newest token given again the newest that was read."""
    cache, counts = make(window=5), []
    for t in range(9):
        counts.append(cache.count)
        cache.append(**tokens(t, t + 1))
    cache.count = counts[8]
    assert sorted(cache.append(**tokens(8, 9))[0]["latent"][0, :, 0].tolist()) == [4, 5, 6, 7, 8]
    cache.count = counts[8]
    with pytest.raises(UsageError, match="overwritten what an earlier token sees"):
        cache.append(torch.tensor([[7]]), **tokens(7, 8))
    cache.count = counts[7]
    with pytest.raises(UsageError, match="overwritten what an earlier token sees"):
        cache.append(**tokens(7, 8))
    cache.count = counts[0]
    assert cache.append(**tokens(0, 1))[0]["latent"][0, :, 0].tolist() == [0]


def test_what_one_sequence_has_lost_is_not_lost_for_another():
    """The tokens taken back were padding in the others."""
    more = torch.full((B, 3), EMPTY)
    more[1] = torch.tensor([9, 10, 11])

    def kept(rows):
        cache = make(window=5)
        cache.append(torch.arange(9)[None].expand(B, -1), **tokens(0, 9))
        count = cache.count
        cache.append(more, **tokens(9, 12))
        cache.count = count
        cache.select_batch(rows)
        return cache.append(**tokens(9, 10, batch=len(rows)))[0]["latent"][..., 0]

    with pytest.raises(UsageError, match="overwritten what an earlier token sees"):
        kept([1, 0])
    assert [sorted(row) for row in kept([0, 2]).tolist()] == [[5, 6, 7, 8, 9]] * 2


def test_sequences_are_kept_by_a_mask_and_others_refused():
    for window in (None, 6):
        cache, mask = make(window=window), torch.tensor([True, False, False, True])
        cache.append(
            **{
                name: row * torch.tensor([1, 2, 3, 4.0]).view(-1, *[1] * (row.dim() - 1))
                for name, row in tokens(1, 3).items()
            }
        )
        cache.select_batch(mask)
        rows, _ = cache.append(**tokens(3, 4, batch=2))
        assert cache.batch_size == 2
        assert rows["latent"][:, :2, 0].tolist() == [[1, 2], [4, 8]]
    for empty in (make(), make(window=6)):
        for rows in (torch.tensor([0, 4]), torch.tensor([-1]), torch.tensor([True, False])):
            with pytest.raises(UsageError, match="the caches hold the sequences 0 to 3"):
                empty.select_batch(rows)


@pytest.mark.parametrize(
    ("capacity", "window", "rows"),
    [(7, None, 7), (7, 5, 5), (5, 7, 5), (None, 5, 5), (6, 6, 6), (None, None, 0)],
)
def test_a17_bytes_held(capacity, window, rows):
    """A17: min(T, W) rows, allocated at once; a token is the numbers of all its rows."""
    for dtype in (torch.float32, torch.bfloat16):
        cache = LayerCache(ROWS, batch_size=B, capacity=capacity, window=window, dtype=dtype)
        assert cache.n_bytes == rows * B * (2 * 3 + 5) * dtype.itemsize


def test_grows_by_doubling(monkeypatch):
    cache, held = make(), []
    monkeypatch.setattr(cache_module, "FIRST_ROWS", 4)
    for t in range(T):
        rows, _ = cache.append(**tokens(t, t + 1))
        assert rows["latent"][0, :, 0].tolist() == list(range(t + 1))
        held.append(cache.n_bytes // (8 * B * 11))
    assert sorted(set(held)) == [4, 8, 16, 32]
    assert FIRST_ROWS == 64


def test_a_ring_does_not_grow():
    cache = make(window=5)
    before = cache.n_bytes
    check(cache, [3, 9, *range(10, T + 1)], 5)
    assert cache.n_bytes == before


@pytest.mark.parametrize("given_positions", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_a_full_cache_refuses(given_positions, window):
    """Without a ring as long as the window, a lost row would change the output."""
    cache = make(capacity=7, window=window)
    positions = torch.arange(8)[None].expand(B, -1) if given_positions else None
    cache.append(None if positions is None else positions[:, :7], **tokens(0, 7))
    with pytest.raises(UsageError, match="capacity=7 tokens and was given 8: build it with capacity=8"):
        cache.append(None if positions is None else positions[:, 7:], **tokens(7, 8))


def test_rows_returned_are_views():
    """Reading the cache copies nothing while no row is overwritten."""
    for window in (None, 30):
        cache = make(capacity=T, window=window)
        rows, _ = cache.append(**tokens(0, 6))
        assert {row.untyped_storage().nbytes() for row in rows.values()} == {B * T * 6 * 8, B * T * 5 * 8}


def test_positions_may_be_given_late():
    """Consecutive tokens first, then named ones, then consecutive ones again; with and without a ring."""
    for window in (None, 6):
        cache = make(window=window)
        seen = seen_by_each(cache, [4, 9], window)
        positions = torch.arange(9, 11)[None].expand(B, -1)
        cache.append(positions, **tokens(9, 11))
        rows, key_positions = cache.append(**tokens(11, 12))
        assert cache.positions is not None
        content = rows["latent"][0, :, 0].long()
        assert torch.equal(content[key_positions[0] != EMPTY], key_positions[0][key_positions[0] != EMPTY])
        assert content.max() == 11
        assert len(seen) == 9


def test_wrong_rows_are_a_bug_of_ours():
    with pytest.raises(AssertionError, match=r"expected rows \['key', 'latent'\], got \['value'\]"):
        make().append(value=torch.zeros(B, 1, 2, 3))


def test_growing_without_memory_changes_nothing(monkeypatch):
    """Whoever catches the error, frees memory and tries again loses no token."""
    cache, zeros, calls = make(), Tensor.new_zeros, []
    monkeypatch.setattr(cache_module, "FIRST_ROWS", 4)
    cache.append(**tokens(0, 4))

    def short(store, *shape, **more):
        calls.append(shape)
        if len(calls) == 2:  # the second of the rows
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(store, *shape, **more)

    monkeypatch.setattr(Tensor, "new_zeros", short)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(**tokens(4, 5))
    for t in range(4, T):
        rows, _ = cache.append(**tokens(t, t + 1))
        assert rows["latent"][0, :, 0].tolist() == list(range(t + 1))
