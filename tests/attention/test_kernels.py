"""The reference kernel against loops in NumPy and torch's own SDPA; every fast kernel against the reference."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from rehead.attention import fused, kernels
from rehead.attention.cache import LayerCache
from rehead.attention.mask import EMPTY, Mask, visible
from rehead.attention.score import Additive

B, L, S, H, K, E, V = 3, 4, 9, 10, 2, 6, 7  # G = H/K = 5
SIZES = {"B": B, "L": L, "S": S, "H": H, "K": K, "E": E, "V": V}
FAST = {"folded": kernels.folded, "sdpa": kernels.sdpa, "attend": kernels.attend}


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


@st.composite
def calls(draw):
    """Arguments of one call: any sizes and grouping, and every kind of mask."""
    n_kv_head, n_query = draw(st.integers(1, 3)), draw(st.integers(1, 5) | st.just(18))
    sizes = {"L": n_query, "S": n_query + draw(st.integers(0, 6)), "K": n_kv_head}
    sizes |= {"H": n_kv_head * draw(st.integers(1, 3))} | {
        letter: draw(st.integers(1, 5)) for letter in "BEV"
    }
    causal = draw(st.booleans())
    positions = {}
    if draw(st.booleans()):
        row = st.integers(EMPTY, 8)
        for name, length in (("query_positions", n_query), ("key_positions", sizes["S"])):
            n_row = draw(st.sampled_from([1, sizes["B"]]))
            rows = draw(st.lists(row, min_size=n_row * length, max_size=n_row * length))
            positions[name] = torch.tensor(rows).reshape(n_row, length)
    window = draw(st.none() | st.integers(1, 9)) if causal else None
    mask = Mask(n_query=n_query, n_key=sizes["S"], causal=causal, window=window, **positions)
    return sizes, mask, draw(st.none() | st.just(0.3)), draw(st.integers(0, 99))


def check_fast(kernel, call):
    """Equal to the reference; a query that sees nothing gets exactly 0."""
    sizes, mask, scale, seed = call
    torch.manual_seed(seed)
    query, key, value = sample(**sizes)
    dense = mask.dense()
    out = kernel(query, key, value, mask, scale=scale)
    expected = kernels.reference(query, key, value, dense, scale=scale)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if dense is not None:
        assert not out[~dense.any(-1).expand(len(out), -1)].any()


@pytest.mark.parametrize("kernel", FAST.values(), ids=FAST)
@settings(max_examples=60)
@given(call=calls())
def test_fast_kernels_are_the_reference(kernel, call):
    check_fast(kernel, call)


def test_broken_kernels_are_caught():
    rows = torch.tensor([[0, 1, 2, EMPTY]])
    keys = torch.tensor([[2, 0, EMPTY, 1, EMPTY, 3, 3, 0, 1]])
    masks = {
        "chunk": Mask(n_query=4, n_key=9),
        "window": Mask(n_query=4, n_key=9, window=3),
        "none": Mask(n_query=4, n_key=9, causal=False),
        "padded": Mask(n_query=4, n_key=9, query_positions=rows, key_positions=keys),
        "whole": Mask(n_query=9, n_key=9),
        "whole, window": Mask(n_query=9, n_key=9, window=3),
        "decoding": Mask(n_query=1, n_key=9),
        "decoding, ring": Mask(n_query=1, n_key=9, window=9),
        "decoding, window": Mask(n_query=1, n_key=9, window=3),
    }

    def check(kernel):
        for mask in masks.values():
            check_fast(kernel, (SIZES | {"L": mask.n_query}, mask, 0.3, 1))

    def top_left(query, key, value, mask, *, scale=None):
        """SDPA's `is_causal` for a chunk with a past: its triangle starts at the wrong corner."""
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    def softmax_of_nothing(query, key, value, mask, *, scale=None):
        """Rows that see nothing spread their weight evenly."""
        dense = mask.dense()
        if dense is not None:
            dense = dense | ~dense.any(-1, keepdim=True)
        return kernels.reference(query, key, value, dense, scale=scale)

    check(by_repeating)
    for kernel in FAST.values():
        check(kernel)
    for mutant in (
        top_left,
        softmax_of_nothing,
        scrambled,
        lambda q, k, v, m, scale: kernels.sdpa(q, k, v, m),  # its own scale
        lambda q, k, v, m, scale: kernels.folded(q, k, v, Mask(n_query=4, n_key=9), scale=scale),
        lambda q, k, v, m, scale: by_repeating(q, k, v, m, scale=scale, heads="repeat"),
        lambda q, k, v, m, scale: kernels.sdpa(q, k, v.roll(1, 2), m, scale=scale),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


@pytest.mark.parametrize("kernel", [kernels.folded, kernels.sdpa])
def test_gradients_are_the_reference(kernel):
    """Also past queries that see nothing: no gradient flows there, and none is NaN."""
    positions = torch.tensor([[0, 1, 2, EMPTY], [EMPTY] * 4, [3, 4, 5, 6]])
    keys = torch.cat([positions, positions + 7, torch.full((3, 1), EMPTY)], 1)
    for mask in (
        Mask(n_query=4, n_key=9, window=3),
        Mask(n_query=4, n_key=9, query_positions=positions, key_positions=keys),
    ):
        grads = []
        for run in (lambda *a, m=mask: kernels.reference(*a, m.dense()), lambda *a, m=mask: kernel(*a, m)):
            torch.manual_seed(1)
            leaves = [t.requires_grad_() for t in sample()]
            grads.append(torch.autograd.grad(run(*leaves).square().sum(), leaves))
        for ours, wanted in zip(*grads, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


def test_attend_uses_every_kernel(monkeypatch):
    """Without a compiler: few queries fold, many go to SDPA, many keys to what is made of it; dropout, scores."""
    monkeypatch.setattr(kernels, "sequence_refuses", lambda *_: "switched off")
    used = []
    for name in ("reference", "folded", "sdpa", "windowed", "continued", "blocked"):
        real = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda *a, _n=name, _k=real, **kw: used.append(_n) or _k(*a, **kw))
    score = Additive(width=3).build(K, H // K, E)
    for n_query, options in ((1, {}), (4, {}), (5, {}), (1, {"pdrop": 0.5}), (5, {"score": score})):
        call = sample(L=n_query, S=n_query)
        kernels.attend(*call, Mask(n_query=n_query, n_key=n_query), **options)
    for n_query in (8, 9):
        call = [t.bfloat16() for t in sample(L=n_query, S=n_query)]
        kernels.attend(*call, Mask(n_query=n_query, n_key=n_query))
    assert used == ["folded", "folded", "sdpa", "blocked", "reference", "folded", "sdpa"]
    used.clear()
    for n_query, n_key, window, pdrop in (
        (17, 512, 256, 0.0),
        (17, 512, 257, 0.0),
        (17, 511, 9, 0.0),
        (4, 512, 9, 0.0),
        (512, 512, None, 0.0),
        (17, 512, None, 0.0),
        (17, 512, 512, 0.0),
        (17, 512, 9, 0.5),
    ):
        call = sample(L=n_query, S=n_key)
        kernels.attend(*call, Mask(n_query=n_query, n_key=n_key, window=window), pdrop=pdrop)
    with torch.no_grad():
        for positions in (None, torch.arange(512)[None]):
            mask = Mask(n_query=17, n_key=512, key_positions=positions)
            kernels.attend(*sample(L=17, S=512), mask)
    assert used == [
        *["windowed", "sdpa", "sdpa", "folded", "sdpa", "sdpa", "sdpa", "windowed"],
        *["continued", "sdpa"],
    ]


DTYPES = {  # budgets: max, mean, phi out, phi grads, u
    torch.float32: (1e-5, 1e-6, 3, 5, 1e-6),
    torch.bfloat16: (2.5e-2, 2.5e-3, 2, 4, 8e-3),
    torch.float16: (4e-3, 4e-4, 2, 4, 1e-3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        (kernels.folded, None),
        (kernels.folded, 5),
        (kernels.sdpa, None),
        (kernels.sdpa, 5),
        (kernels.windowed, 5),
    ],
)
def test_low_precision_keeps_the_budget(kernel, dtype, window, monkeypatch):
    """N14: a fast kernel is as near the float64 gold as the reference of the same type, outputs and gradients."""
    monkeypatch.setattr(fused, "CHUNK", 8)
    most, on_average, for_outputs, for_gradients, unit = DTYPES[dtype]
    low = sample(L=24, S=40, E=32, V=16, dtype=dtype)
    mask = Mask(n_query=24, n_key=40, window=window)

    def run(kernel, leaves):
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = kernel(*leaves)
        grads = torch.autograd.grad(out.float().square().mean() * 100, leaves)
        return [t.detach().double() for t in (out, *grads)]

    def reference(q, k, v):
        return kernels.reference(q, k, v, mask.dense())

    def check(kernel):
        gold, plain, fast = (
            run(*call) for call in ((reference, [t.double() for t in low]), (reference, low), (kernel, low))
        )
        for i, (exact, b, a) in enumerate(zip(gold, plain, fast, strict=True)):
            largest = exact.abs().max()
            assert a.isfinite().all()
            assert (a - b).abs().max() <= most * largest
            assert (a - b).abs().mean() <= on_average * largest
            allowed = (for_gradients if i else for_outputs) * max((b - exact).abs().max(), unit * largest)
            assert (a - exact).abs().max() <= allowed

    check(lambda q, k, v: kernel(q, k, v, mask))
    for mutant in (
        lambda q, k, v: kernel(q, k, v, mask, scale=32**-0.5 * (1.01 if dtype == torch.float32 else 1.3)),
        lambda q, k, v: kernel(q, k, v, Mask(n_query=24, n_key=40, window=(window or 40) - 1)),
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
    kernels._slow.cache_clear()
    monkeypatch.setattr(kernels, "MANY", 2 * 5 * 6 * 7 + 1)
    kernels.weights(query, key)
    assert not caplog.records
    monkeypatch.setattr(kernels, "MANY", 2 * 5 * 6 * 7)
    for _ in range(2):
        kernels.weights(query, key)
    (said,) = caplog.messages
    assert said.startswith("slow: 420 attention weights and more in one call")
    kernels._slow.cache_clear()
