"""Windows in chunks, and chunks after a past: equal to the definition, both ways; linear in memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import by
from rehead.attention import kernels
from rehead.attention.kernels import windowed as chunks
from rehead.attention.kernels.continued import Continued
from rehead.attention.kernels.sdpa import SDPA
from rehead.attention.kernels.windowed import Windowed
from rehead.attention.mask import Mask
from rehead.measure.memory_in_use import peak_allocated

B, H, K, E, V = 3, 10, 2, 6, 7
in_chunks, in_two_parts, sdpa = by(Windowed()), by(Continued()), by(SDPA())


def sample(n_query, n_key, batch=B, dtype=torch.float64):
    shapes = ((batch, n_query, H, E), (batch, n_key, K, E), (batch, n_key, K, V))
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def with_gradients(kernel, leaves):
    leaves = [t.clone().requires_grad_() for t in leaves]
    out = kernel(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def check(found, wanted):
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-12)


@settings(max_examples=60)
@given(
    n_query=st.integers(1, 70),
    past=st.integers(0, 40),
    window=st.integers(1, 80),
    batch=st.sampled_from([1, 3]),
    chunk=st.sampled_from([4, 7, 64]),
)
def test_a_window_in_chunks_is_the_reference(n_query, past, window, batch, chunk):
    """N11: any length, with and without a past, shorter and longer than the window; outputs and gradients."""
    torch.manual_seed(0)
    leaves = sample(n_query, n_query + past, batch)
    mask = Mask(n_query=n_query, n_key=n_query + past, window=window)
    before, chunks.CHUNK = chunks.CHUNK, chunk
    try:
        found = with_gradients(lambda *call: in_chunks(*call, mask, scale=0.3), leaves)
    finally:
        chunks.CHUNK = before
    check(found, with_gradients(lambda *call: kernels.reference(*call, mask.dense(), scale=0.3), leaves))


def test_a_window_off_by_one_is_caught():
    leaves = sample(200, 230)
    right = kernels.reference(*leaves, Mask(n_query=200, n_key=230, window=9).dense())
    check([in_chunks(*leaves, Mask(n_query=200, n_key=230, window=9))], [right])
    for window in (8, 10):
        with pytest.raises(AssertionError):
            check([in_chunks(*leaves, Mask(n_query=200, n_key=230, window=window))], [right])


@pytest.mark.parametrize(("n_query", "past"), [(2, 1), (2, 30), (17, 1), (17, 30), (40, 300)])
def test_a_chunk_after_its_past_is_the_reference(n_query, past):
    """N08: bottom-right aligned, where torch's own `is_causal` is not."""
    leaves = sample(n_query, n_query + past)
    mask = Mask(n_query=n_query, n_key=n_query + past)
    right = kernels.reference(*leaves, mask.dense(), scale=0.3)
    check([in_two_parts(*leaves, mask, scale=0.3)], [right])
    for mutant in (
        lambda q, k, v: in_two_parts(q, k, v, mask),
        lambda q, k, v: in_two_parts(q, k.roll(1, 1), v.roll(1, 1), mask, scale=0.3),
    ):
        with pytest.raises(AssertionError):
            check([mutant(*leaves)], [right])


BUDGETS = {torch.float32: (1e-5, 1e-6, 3, 1e-6), torch.bfloat16: (2.5e-2, 2.5e-3, 2, 8e-3)}


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_a_chunk_after_its_past_keeps_the_budget(dtype):
    most, on_average, times, unit = BUDGETS[dtype]
    low = sample(40, 300, dtype=dtype)
    mask = Mask(n_query=40, n_key=300)
    gold = kernels.reference(*(t.double() for t in low), mask.dense())
    plain, fast = (t.double() for t in (kernels.reference(*low, mask.dense()), in_two_parts(*low, mask)))
    largest = gold.abs().max()
    assert (fast - plain).abs().max() <= most * largest
    assert (fast - plain).abs().mean() <= on_average * largest
    assert (fast - gold).abs().max() <= times * max((plain - gold).abs().max(), unit * largest)


def windowed(n, window, backward):
    """One call of `attend`, forward or both ways."""
    leaves = [t.requires_grad_(backward) for t in sample(n, n, 1)]
    mask = Mask(n_query=n, n_key=n, window=window)

    def run():
        out = kernels.attend(*leaves, mask)
        return torch.autograd.grad(out.sum(), leaves) if backward else out

    return run


@pytest.mark.heavy
@pytest.mark.parametrize("backward", [False, True])
def test_memory_of_a_window_is_linear(backward):
    """Bytes allocated at the peak, per doubling of N: 2; with a mask it is nearer 4."""
    peaks = [peak_allocated(windowed(n, 64, backward)) for n in (1024, 2048)]
    assert peaks[1] / peaks[0] <= 2.15
    masked = [
        peak_allocated(lambda n=n: sdpa(*sample(n, n, 1), Mask(n_query=n, n_key=n, window=64)))
        for n in (1024, 2048)
    ]
    assert masked[1] / masked[0] > 2.5


def test_what_a_window_is_made_of():
    """No operator that repeats keys, no N x N softmax."""
    with torch.profiler.profile() as profiled:
        windowed(1024, 64, True)()
    names = {event.name for event in profiled.events()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    forbidden = {
        "aten::_scaled_dot_product_attention_math",
        "aten::repeat_interleave",
        "aten::_softmax",
        "aten::bmm",
    }
    assert not names & forbidden
