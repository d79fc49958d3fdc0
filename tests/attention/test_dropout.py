"""Dropout from 15 random bits a number: the right share, independent, unbiased, the gradient under the same mask."""

import pytest
import torch
from torch import nn

from calls import by
from rehead.attention import kernels
from rehead.attention.kernels.blocked import Blocked
from rehead.attention.kernels.sdpa import SDPA
from rehead.attention.kernels.windowed import Windowed
from rehead.attention.mask import EMPTY, Mask
from rehead.measure.memory_in_use import peak_allocated
from rehead.nn.dropout import STEPS, Dropout, draw, dropout, threshold


@pytest.mark.parametrize("pdrop", [0.1, 0.5, 0.03])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_each_number_is_dropped_with_the_probability(pdrop, dtype):
    """B21: within 5 standard deviations of p; what is kept is divided by 1 - p; neighbours are independent."""
    n = 200_001  # no multiple of four
    x = torch.rand(n, dtype=dtype) + 1
    x.requires_grad_()
    out = dropout(x, pdrop)
    dropped = out == 0
    five = 5 * (pdrop * (1 - pdrop) / n) ** 0.5
    assert dropped.double().mean().item() == pytest.approx(pdrop, abs=five)
    share = (dropped[:-1] & dropped[1:]).double().mean().item()
    assert share == pytest.approx(pdrop**2, abs=10 * pdrop / n**0.5)
    close = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-4, "atol": 0}
    torch.testing.assert_close(out, torch.where(dropped, 0, x / (1 - pdrop)), **close)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, torch.where(dropped, 0, torch.ones_like(x) / (1 - pdrop)), **close)


def test_draws_are_uniform_and_the_seed_decides_them():
    torch.manual_seed(1)
    first = draw((1000, 300))
    counts = torch.bincount(first.flatten().long() >> 8, minlength=STEPS >> 8).double()
    expected = first.numel() / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 200  # chi squared with 127 degrees of freedom
    assert not torch.equal(first, draw((1000, 300)))
    torch.manual_seed(1)
    assert torch.equal(first, draw((1000, 300)))


def test_probabilities_are_rounded_to_what_the_bits_can_say():
    assert threshold(0.25) == STEPS // 4
    assert threshold(0.1) / STEPS == pytest.approx(0.1, abs=0.5 / STEPS)
    assert threshold(0.999999999) < STEPS


def test_exactly_the_draws_below_the_threshold_drop(monkeypatch):
    def every_draw(shape):
        return torch.arange(STEPS, dtype=torch.int16).view(shape)

    monkeypatch.setattr("rehead.nn.dropout.draw", every_draw)
    monkeypatch.setattr("rehead.attention.kernels.blocked.draw", every_draw)
    assert (dropout(torch.ones(STEPS), 0.1) == 0).sum() == threshold(0.1)
    n = 256
    query, key = torch.randn(1, STEPS // n, 1, 3), torch.randn(1, n, 1, 3)
    shown = blocked(
        query, key, torch.eye(n)[None, :, None], Mask(n_query=STEPS // n, n_key=n, causal=False), pdrop=0.1
    )
    assert (shown == 0).sum() == threshold(0.1)


def test_the_module_drops_in_training_only():
    module, x = Dropout(0.5), torch.ones(1000)
    assert (module(x) == 0).any()
    assert module.eval()(x) is x
    assert Dropout(0.0)(x) is x


blocked, in_chunks = by(Blocked()), by(Windowed())
B, L, H, K, E, V = 5, 18, 6, 2, 3, 7  # G = 3
POSITIONS = torch.arange(L).expand(B, -1).clone()
POSITIONS[1, :4] = EMPTY
MASKS = {
    "causal": Mask(n_query=L, n_key=L),
    "window": Mask(n_query=L, n_key=L, window=5),
    "all": Mask(n_query=L, n_key=L, causal=False),
    "padded": Mask(n_query=L, n_key=L, query_positions=POSITIONS, key_positions=POSITIONS),
}


def sample(dtype=torch.float64):
    shapes = ((B, L, H, E), (B, L, K, E), (B, L, K, V))
    return [torch.randn(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def by_definition(query, key, value, mask, pdrop, way=blocked):
    """The reference under the very mask that `way` draws, read off values that show the weights."""
    state = torch.get_rng_state()
    eye = torch.eye(L, dtype=query.dtype)[:, None].expand(B, -1, K, -1)
    shown = way(query, key, eye, mask, scale=0.4, pdrop=pdrop).detach()  # B L H S
    torch.set_rng_state(state)
    kept = (shown != 0).unflatten(2, (K, -1)).permute(0, 2, 3, 1, 4)  # B K G L S
    weights = kernels.weights(query, key, mask.dense(), scale=0.4) * kept / (1 - pdrop)
    return torch.einsum("bkgls,bskv->blkgv", weights, value).flatten(2, 3)


def check(found, wanted, **close):
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, **close)


def both_ways(run, leaves):
    out = run(*leaves)
    torch.manual_seed(3)
    return out.detach(), *torch.autograd.grad(out, leaves, torch.randn_like(out))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("pdrop", [0.0, 0.25])
@pytest.mark.parametrize("block", [1, 3000, 1 << 18])
def test_blocks_are_the_reference_with_the_same_weights_dropped(mask, pdrop, block, monkeypatch):
    monkeypatch.setattr("rehead.attention.kernels.blocked.BLOCK", block)
    leaves = sample()
    results = []
    for run in (
        lambda *a: blocked(*a, mask, scale=0.4, pdrop=pdrop),
        lambda *a: by_definition(*a, mask, pdrop),
    ):
        torch.manual_seed(2)
        results.append(both_ways(run, leaves))
    check(*results, rtol=1e-12, atol=1e-12)
    torch.manual_seed(2)
    other = both_ways(lambda *a: blocked(*a, mask, scale=0.4, pdrop=pdrop + 0.25), leaves)
    with pytest.raises(AssertionError):
        check(other, results[1])


@pytest.mark.parametrize("chunk", [4, 64])
def test_a_window_in_chunks_drops_weights(chunk, monkeypatch):
    """Outputs and gradients of the reference with the same weights dropped, a quarter of those there are."""
    monkeypatch.setattr("rehead.attention.kernels.windowed.CHUNK", chunk)
    mask = Mask(n_query=L, n_key=L, window=5)

    leaves, results = sample(), []
    for run in (
        lambda *a: in_chunks(*a, mask, scale=0.4, pdrop=0.25),
        lambda *a: by_definition(*a, mask, 0.25, in_chunks),
    ):
        torch.manual_seed(2)
        results.append(both_ways(run, leaves))
    check(*results, rtol=1e-12, atol=1e-12)
    torch.manual_seed(2)
    other = both_ways(lambda *a: in_chunks(*a, mask, scale=0.4, pdrop=0.0), leaves)
    with pytest.raises(AssertionError):
        check(other, results[1])


@pytest.mark.parametrize("pdrop", [0.0, 0.1])
def test_a_window_takes_linear_memory_with_dropout_too(pdrop):
    def peak(n):
        leaves = [torch.randn(1, n, 2, 8, dtype=torch.float32).requires_grad_() for _ in range(3)]
        mask = Mask(n_query=n, n_key=n, window=64)
        return peak_allocated(lambda: kernels.attend(*leaves, mask, pdrop=pdrop).sum().backward())

    assert peak(2048) < 2.15 * peak(1024)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_in_low_precision(dtype):
    most = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2}[dtype]
    low = sample(dtype)
    results = []
    for leaves in (low, [t.detach().double().requires_grad_() for t in low]):
        torch.manual_seed(2)
        out = blocked(*leaves, MASKS["causal"], scale=0.4, pdrop=0.25)
        results.append([out.detach(), *torch.autograd.grad(out.double().square().sum(), leaves)])
    for ours, gold in zip(*results, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - gold).abs().max() <= 2 * most * gold.abs().max()


@pytest.mark.parametrize(
    "run", [lambda x: dropout(x, 0.5), lambda x: blocked(x, x, x, MASKS["causal"], pdrop=0.5)]
)
def test_second_derivatives_are_refused(run):
    """Without that they would be wrong."""
    x = torch.randn(1, L, 2, 5, requires_grad=True)
    (first,) = torch.autograd.grad(run(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_an_expanded_gradient_is_left_as_it_is():
    leaves = sample()
    torch.autograd.grad(blocked(*leaves, MASKS["all"], pdrop=0.5).sum(), leaves)


def test_weights_are_kept_once():
    """Bytes at the peak of both passes: one matrix of weights, not the three PyTorch's path keeps."""
    leaves = [torch.randn(8, 256, 4, 8, dtype=torch.float32).requires_grad_() for _ in range(3)]
    mask = Mask(n_query=256, n_key=256)

    def run(kernel):
        return peak_allocated(lambda: torch.autograd.grad(kernel().sum(), leaves))

    ours = run(lambda: kernels.attend(*leaves, mask, pdrop=0.1))
    theirs = run(lambda: by(SDPA())(*leaves, mask, pdrop=0.1))
    weights = 8 * 4 * 256 * 256 * 4
    assert ours < 2 * weights < 3 * weights < theirs


def test_a_step_with_dropout_draws_no_number_alone():
    leaves = [torch.randn(2, 32, 4, 8).requires_grad_() for _ in range(3)]
    with torch.profiler.profile() as profiled:
        gathered = kernels.attend(*leaves, Mask(n_query=32, n_key=32), pdrop=0.1)
        Dropout(0.1)(nn.Linear(8, 8)(gathered)).sum().backward()
    names = {event.name for event in profiled.events()}
    assert not names & {
        "aten::bernoulli_",
        "aten::native_dropout",
        "aten::_scaled_dot_product_attention_math",
    }


def test_a_compiled_graph_has_torchs_own_dropout(monkeypatch):
    """It would refuse ours: bits seen as other numbers."""
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    leaves = [torch.randn(2, 32, 4, 8).requires_grad_() for _ in range(3)]
    with torch.profiler.profile() as profiled:
        dropout(kernels.attend(*leaves, Mask(n_query=32, n_key=32), pdrop=0.1), 0.1)
    names = [event.name for event in profiled.events()]
    assert "aten::random_" not in names
    assert names.count("aten::bernoulli_") == 2
