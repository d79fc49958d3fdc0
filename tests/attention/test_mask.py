"""Who may see whom, against the rule written out pair by pair."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rehead.attention.mask import EMPTY, Mask, visible

HOMEWORK_3_1 = [  # N = 6, w = 4, 1 where the homework's M is 0
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0],
    [0, 1, 1, 1, 0, 0],
    [0, 0, 1, 1, 1, 0],
    [0, 0, 0, 1, 1, 1],
]


def pair_by_pair(queries, keys, window, causal):
    def sees(q, k):
        return q != -1 and k != -1 and (not causal or (k <= q and (window is None or k > q - window)))

    rows = zip(queries, keys, strict=True)
    return torch.tensor([[[sees(q, k) for k in ks] for q in qs] for qs, ks in rows])


def test_b11_window_matrix():
    """B11: w = 4 of the homework is a window of W = w/2 + 1 = 3 keys, the query's own included."""

    def check(rule):
        positions = torch.arange(6)[None]
        assert rule(positions, positions, 4 // 2 + 1)[0].int().tolist() == HOMEWORK_3_1

    def two_sided(queries, keys, window):
        return (queries[:, :, None] - keys[:, None, :]).abs() < window

    check(visible)
    for mutant in (
        lambda q, k, window: visible(q, k, window + 1),  # one further back
        lambda q, k, window: visible(q, k, window - 1),  # the query's own not counted
        lambda q, k, window: visible(q, k, 4),  # w taken for W
        lambda q, k, window: visible(q, k),  # no window
        lambda q, k, window: visible(q - 1, k, window),  # not itself
        two_sided,
    ):
        with pytest.raises(AssertionError):
            check(mutant)


@given(data=st.data(), window=st.none() | st.integers(1, 7), causal=st.booleans())
def test_the_rule_is_pair_by_pair(data, window, causal):
    row = st.lists(st.integers(EMPTY, 9), min_size=5, max_size=5)
    queries = data.draw(st.lists(row.map(lambda r: r[:3]), min_size=2, max_size=2))
    keys = data.draw(st.lists(row, min_size=2, max_size=2))
    seen = visible(torch.tensor(queries), torch.tensor(keys), window, causal=causal)
    assert torch.equal(seen, pair_by_pair(queries, keys, window, causal))


def test_one_row_of_positions_serves_the_batch():
    one, many = torch.arange(4)[None], torch.tensor([[0, 1, 2, 3], [0, 1, EMPTY, EMPTY], [2, 3, 4, 5]])
    for queries, keys in ((one, many), (many, one)):
        seen = visible(queries, keys)
        assert torch.equal(seen, visible(queries.expand(3, -1), keys.expand(3, -1)))
        mask = Mask(n_query=4, n_key=4, query_positions=queries, key_positions=keys)
        assert torch.equal(mask.dense(), seen)


def check_shortcuts(mask_type):
    """`hides_nothing` and `is_causal_square` say exactly what the matrix says."""
    for n_query, n_past, window, causal in product((1, 2, 4), range(5), (None, 1, 2, 3, 6), (True, False)):
        n_key = n_query + n_past
        if window is not None and not causal:
            continue
        mask = mask_type(n_query=n_query, n_key=n_key, causal=causal, window=window)
        seen = pair_by_pair([range(n_past, n_key)], [range(n_key)], window, causal)
        dense = mask.dense()
        assert torch.equal(torch.ones_like(seen) if dense is None else dense, seen)
        assert mask.hides_nothing == (dense is None) == bool(seen.all())
        triangle = n_past == 0 and torch.equal(seen, torch.ones_like(seen).tril())
        assert mask.is_causal_square == (causal and triangle)


def test_shortcuts_are_exactly_the_dense_mask():
    @dataclass(frozen=True, kw_only=True, eq=False)
    class OneQuerySeesAll(Mask):
        @property
        def hides_nothing(self):
            return not self.causal or self.n_query == 1

    @dataclass(frozen=True, kw_only=True, eq=False)
    class SquareWhateverTheWindow(Mask):
        @property
        def is_causal_square(self):
            return self.causal and self.n_query == self.n_key

    @dataclass(frozen=True, kw_only=True, eq=False)
    class SquareWithAPast(Mask):
        @property
        def is_causal_square(self):
            return self.causal and (self.window is None or self.n_key <= self.window)

    @dataclass(frozen=True, kw_only=True, eq=False)
    class TopLeft(Mask):
        def dense(self, device="cpu"):
            queries, keys = torch.arange(self.n_query)[None], torch.arange(self.n_key)[None]
            return None if self.hides_nothing else visible(queries, keys, self.window, causal=self.causal)

    check_shortcuts(Mask)
    for mutant in (OneQuerySeesAll, SquareWhateverTheWindow, SquareWithAPast, TopLeft):
        with pytest.raises(AssertionError):
            check_shortcuts(mutant)


@pytest.mark.parametrize("given", ["query_positions", "key_positions"])
def test_no_shortcut_past_given_positions(given):
    """What stands at `EMPTY` is hidden, however square the call."""
    for n, causal in product((1, 3), (True, False)):
        mask = Mask(n_query=n, n_key=n, causal=causal, **{given: torch.full((1, n), EMPTY)})
        assert not mask.hides_nothing
        assert not mask.is_causal_square
        assert not mask.dense().any()


def test_padded_context_longer_or_shorter_than_the_queries():
    """Without causality only padding is hidden, and only the context's: also from the first queries."""
    context = torch.tensor([[0, 1, EMPTY]])
    for n_query in (1, 2, 3, 4, 7):
        mask = Mask(n_query=n_query, n_key=3, causal=False, key_positions=context)
        assert mask.dense()[0].tolist() == [[True, True, False]] * n_query
