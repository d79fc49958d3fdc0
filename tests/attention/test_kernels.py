"""The reference kernel against loops in NumPy and torch's own SDPA; what the seeds ask of `attend`."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from rehead.attention import kernels
from rehead.attention.cache import LayerCache
from rehead.attention.kernels import definition
from rehead.attention.mask import Mask, visible
from rehead.attention.score import Additive, SoftCapped

B, L, S, H, K, E, V = 3, 4, 9, 10, 2, 6, 7  # G = H/K = 5
SIZES = {"B": B, "L": L, "S": S, "H": H, "K": K, "E": E, "V": V}


def sample(dtype=torch.float64, **sizes):
    """Queries, keys and values."""
    sizes = SIZES | sizes
    return tuple(
        torch.randn([sizes[letter] for letter in shape], dtype=dtype) for shape in ("BLHE", "BSKE", "BSKV")
    )


def by_repeating(query, key, value, mask=None, *, scale=None, heads="repeat_interleave"):
    """Attention with every KV head copied for its query heads; `mask` is a `Mask` or a matrix."""
    group = query.shape[2] // key.shape[2]
    copies = {
        "repeat_interleave": lambda t: t.repeat_interleave(group, 2),
        "repeat": lambda t: t.repeat(1, 1, group, 1),
    }[heads]
    dense = mask.dense() if isinstance(mask, Mask) else mask
    return kernels.reference(query, copies(key), copies(value), dense, scale=scale)


def scrambled(query, key, value, mask=None, *, scale=None):
    """Query heads of one KV head stacked the wrong way round."""
    group = (-1, query.shape[2] // key.shape[2])
    query = query.unflatten(2, group).transpose(2, 3).flatten(2, 3)
    return by_repeating(query, key, value, mask, scale=scale)


def test_a2_a4_reference_is_the_loop(by_loops):
    """A2, A4: softmax of K q / sqrt(D_qk) over the keys seen, head by head; no mask sees all."""
    query, key, value = sample()
    seen = torch.rand(B, L, S) < 0.6
    seen[1, 2] = False

    def check(kernel):
        torch.testing.assert_close(kernel(query, key, value), by_loops(query, key, value))
        torch.testing.assert_close(kernel(query, key, value, seen), by_loops(query, key, value, seen))

    check(kernels.reference)
    check(by_repeating)
    for mutant in (
        lambda q, k, v, m=None: kernels.reference(q, k, v, m, scale=1.0),  # no scale
        lambda q, k, v, m=None: kernels.reference(q, k, v, m, scale=V**-0.5),
        lambda q, k, v, m=None: kernels.reference(q, k, v),  # no mask
        lambda q, k, v, m=None: kernels.reference(q, k, v, None if m is None else ~m),
        lambda q, k, v, m=None: by_repeating(q, k, v, m, heads="repeat"),
        scrambled,
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def test_a4_b5_reference_is_sdpa():
    """A4, B5: as torch computes it, grouped and causal."""
    query, key, value = sample(L=S)

    def check(kernel):
        heads_first = [t.transpose(1, 2) for t in (query, key, value)]
        expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        mask = visible(torch.arange(S)[None], torch.arange(S)[None])
        torch.testing.assert_close(kernel(query, key, value, mask), expected.transpose(1, 2))

    check(kernels.reference)
    for mutant in (
        lambda q, k, v, m: kernels.reference(q, k, v),  # not causal
        lambda q, k, v, m: kernels.reference(q, k, v, m.tril(-1)),  # not itself
        lambda q, k, v, m: kernels.reference(q, k, v, m, scale=1 / E),
        lambda q, k, v, m: by_repeating(q, k, v, m, heads="repeat"),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def test_b12_masked_matmul_costs_n_squared():
    """B12: 2 H (E + V) N^2 FLOPs with a masked matrix, whatever the window."""

    def check(kernel):
        for n, window in ((8, 2), (8, 5), (16, 5)):
            with FlopCounterMode(display=False) as counter:
                kernel(*sample(L=n, S=n), window)
            assert counter.get_total_flops() == 2 * B * H * (E + V) * n**2

    def masked(query, key, value, window):
        n = query.shape[1]
        return kernels.reference(query, key, value, Mask(n_query=n, n_key=n, window=window).dense())

    check(masked)
    with pytest.raises(AssertionError):
        check(lambda *call: windowed(*call)[0])


def windowed(query, key, value, window, rows=None):
    """B13's algorithm: token by token through a ring; also how many pairs were scored."""
    shapes = {"key": key.shape[2:], "value": value.shape[2:]}
    cache = LayerCache(shapes, batch_size=len(key), window=rows or window, dtype=key.dtype)
    out, pairs = [], 0
    for t in range(query.shape[1]):
        here = slice(t, t + 1)
        kept, _ = cache.append(key=key[:, here], value=value[:, here])
        pairs += kept["key"].shape[1]
        mask = Mask(n_query=1, n_key=kept["key"].shape[1], window=window)
        out.append(kernels.attend(query[:, here], kept["key"], kept["value"], mask))
    assert cache.n_bytes == 8 * len(key) * (rows or window) * K * (E + V)  # O(w) space
    return torch.cat(out, 1), pairs


@pytest.mark.parametrize(("n", "window"), [(9, 1), (9, 4), (13, 6), (7, 7), (5, 8)])
def test_b13_windowed_algorithm(n, window):
    """B13: row t reads keys max(0, t - W + 1) .. t: W N - W (W - 1) / 2 pairs, and B12's output."""
    call = sample(L=n, S=n)

    def check(rows):
        out, pairs = windowed(*call, window, rows)
        dense = Mask(n_query=n, n_key=n, window=window).dense()
        torch.testing.assert_close(out, kernels.reference(*call, dense), rtol=1e-13, atol=1e-14)
        W = min(window, n)
        assert pairs == W * n - W * (W - 1) // 2 == dense.sum()

    check(window)
    for off in (-1, 1):
        if 0 < window + off < n:
            with pytest.raises(AssertionError):
                check(window + off)


@pytest.mark.parametrize("n_query", [5, 20])
@pytest.mark.parametrize("score", [None, "additive"])
def test_b21_dropout_of_weights(n_query, score):
    """B21: each weight is dropped with probability p, the others are divided by 1 - p."""
    n_key, p = 20, 0.25
    query, key, _ = sample(L=n_query, S=n_key)
    eye = torch.eye(n_key)[:, None].expand(B, -1, K, -1)  # values that show the weights
    mask = Mask(n_query=n_query, n_key=n_key, causal=False)
    score = score and Additive(width=3).build(K, H // K, E)
    kept = kernels.attend(query, key, eye, mask, score=score)

    def check(pdrop, rescale=1.0):
        shown = kernels.attend(query, key, eye, mask, score=score, pdrop=pdrop) * rescale
        dropped = shown == 0
        torch.testing.assert_close(shown, torch.where(dropped, 0, kept / (1 - p)))
        assert dropped.double().mean().item() == pytest.approx(p, abs=0.03)

    check(p)
    for mutant in ((0.0,), (0.5,), (p, 1 - p)):
        with pytest.raises(AssertionError):
            check(*mutant)


def test_many_weights_are_said_to_be_slow_once(monkeypatch, caplog):
    query, key = torch.randn(2, 5, 6, 3), torch.randn(2, 7, 2, 3)
    definition._warn_slow.cache_clear()
    monkeypatch.setattr(definition, "MANY", 2 * 5 * 6 * 7 + 1)
    kernels.weights(query, key)
    assert not caplog.records
    monkeypatch.setattr(definition, "MANY", 2 * 5 * 6 * 7)
    for _ in range(2):
        kernels.weights(query, key)
    (said,) = caplog.messages
    assert said == "slow: at least 420 attention weights in one call with the reference kernel (request)"
    kernels.weights(query, key, score=SoftCapped(cap=30.0).build(2, 3, 3))
    assert caplog.messages[-1].endswith("(scores with a cap of 30)")
    definition._warn_slow.cache_clear()


@pytest.mark.parametrize("pdrop", [0.0, 0.5])
def test_a_mask_that_is_not_causal_ignores_its_window(pdrop):
    """As `visible` defines, whichever kernel computes it."""
    query, key, value = sample(torch.float32, L=40, S=40)
    mask = Mask(n_query=40, n_key=40, causal=False, window=4)
    torch.manual_seed(0)
    kept = kernels.attend(query, key, torch.ones_like(value), mask, pdrop=pdrop)
    assert abs(kept.mean().item() - 1) < 0.05


@torch.no_grad()
def test_a_chunk_of_heads_that_lie_apart():
    """PyTorch's operator reads the last axis in steps of 1, whatever its stride."""
    query, key, value = (t[..., ::2] for t in sample(L=20, S=700, E=8, V=8))
    mask = Mask(n_query=20, n_key=700)
    assert kernels.choose(kernels.Call(query, key, value, mask, E**-0.5)).kernel.name == "continued"
    torch.testing.assert_close(
        kernels.attend(query, key, value, mask), kernels.reference(query, key, value, mask.dense())
    )
