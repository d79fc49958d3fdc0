"""Whole sequences in C++: the reference and its gradients, under every rule, with the very weights dropped; GELU."""

import ctypes
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from calls import by
from rehead.attention import kernels
from rehead.attention.kernels import compiled
from rehead.attention.kernels.blocked import Blocked
from rehead.attention.mask import Mask
from rehead.native import KernelUnavailable
from rehead.native import sequence as native
from rehead.native.build import HERE
from rehead.nn.dropout import STEPS
from rehead.nn.gelu import gelu

pytestmark = pytest.mark.skipif(isinstance(native.kernel(), KernelUnavailable), reason=str(native.kernel()))
SIZES = {  # B, L, S, H, K, E, V
    "one": (1, 1, 1, 1, 1, 1, 1),
    "less than a tile": (2, 5, 9, 6, 2, 20, 36),
    "whole tiles": (1, 64, 128, 2, 2, 32, 32),
    "odd": (3, 45, 77, 6, 3, 17, 5),
    "several tiles, MQA": (2, 130, 130, 3, 1, 8, 64),
    "after a long past": (1, 33, 300, 4, 2, 24, 24),
    "several segments": (1, 600, 641, 4, 2, 8, 8),
    "wide heads": (1, 520, 520, 1, 1, 100, 70),
}
in_cpp = by(compiled.Compiled())
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
WINDOWED = {  # no window, one that hides nothing, and those that hide something
    f"{name}, {window}": (sizes, window)
    for name, sizes in SIZES.items()
    for window in (None, 1, 7, 70, 150, 1000)
    if window in (None, 1000) or window < sizes[2]
}
each_window = pytest.mark.parametrize(("sizes", "window"), WINDOWED.values(), ids=WINDOWED)


def sample(sizes, dtype=torch.float32):
    B, L, S, H, K, E, V = sizes
    return [torch.randn(*shape, dtype=dtype) for shape in ((B, L, H, E), (B, S, K, E), (B, S, K, V))]


def rule(sizes, window=None, causal=True):
    return Mask(n_query=sizes[1], n_key=sizes[2], window=window, causal=causal)


def both_ways(way, tensors):
    """The output and the gradients of all inputs."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = way(*leaves)
    torch.manual_seed(3)
    upstream = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def assert_near(found, wanted, off=2e-6):
    """Every number within `off` of the largest of all, or of 1: what cancels is as far off as what it is made of."""
    largest = max([1.0, *(float(exact.abs().max()) for exact in wanted if exact.numel())])
    for ours, exact in zip(found, wanted, strict=True):
        assert ours.isfinite().all()
        assert not exact.numel() or (ours - exact).abs().max() <= off * largest


@each_window
def test_it_is_the_reference(sizes, window):
    torch.set_num_threads(2)
    tensors, mask = sample(sizes), rule(sizes, window)

    def exact(scale=0.3, mask=mask):
        return both_ways(
            lambda *a: kernels.reference(*a, mask.dense(), scale=scale), [t.double() for t in tensors]
        )

    found = both_ways(lambda *a: in_cpp(*a, mask, scale=0.3), tensors)
    assert_near(found, exact())
    mutants = []
    if sizes[2] > 1 and window != 1:
        mutants = [exact(scale=0.31), exact(mask=rule(sizes, min(window or sizes[2], sizes[2]) - 1))]
    if sizes[1] > 1:
        mutants.append(exact(mask=rule(sizes, causal=False)))
    for mutant in mutants:
        with pytest.raises(AssertionError):
            assert_near(found, mutant)


@each_size
def test_without_causality_all_is_seen(sizes):
    tensors, mask = sample(sizes), rule(sizes, causal=False)
    wanted = both_ways(lambda *a: kernels.reference(*a), [t.double() for t in tensors])
    assert_near(both_ways(lambda *a: in_cpp(*a, mask), tensors), wanted)


@each_window
def test_it_drops_the_weights_that_were_drawn(sizes, window, monkeypatch):
    """A reference that drops by the same draws; a quarter of the weights goes, the rest grows."""
    B, L, S, H, K, _, _ = sizes
    tensors, mask = sample(sizes), rule(sizes, window)
    n_drawn = min(window or S, S)
    draws = torch.randint(-(2**15), 2**15, (B, H, L, n_drawn), dtype=torch.int16)
    monkeypatch.setattr(compiled, "raw_draw", lambda shape: draws.view(shape))
    found = both_ways(lambda *a: in_cpp(*a, mask, pdrop=0.25), tensors)
    last = torch.arange(S - L, S)[:, None]
    at = torch.arange(S) - (last + 1 - n_drawn).clamp(min=0)  # of each key among those drawn for a query
    keeps = (draws & (STEPS - 1)).gather(3, at.clamp(0, n_drawn - 1).expand(B, H, -1, -1)) >= STEPS // 4

    def exact(keeps=keeps):
        def way(query, key, value):
            weights = kernels.weights(query, key, mask.dense()) * keeps.unflatten(1, (K, -1)) / 0.75
            return torch.einsum("bkgls,bskv->blkgv", weights, value).flatten(2, 3)

        return both_ways(way, [t.double() for t in tensors])

    assert_near(found, exact())
    if L > 5:
        with pytest.raises(AssertionError):
            assert_near(found, exact(keeps.roll(1, dims=2)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_float32(dtype):
    """No further from the float64 gold than rounding the result is."""
    tensors, mask = [t.to(dtype) for t in sample(SIZES["odd"])], rule(SIZES["odd"])
    found = both_ways(lambda *a: in_cpp(*a, mask), tensors)
    wanted = both_ways(lambda *a: kernels.reference(*a, mask.dense()), [t.double() for t in tensors])
    assert all(t.dtype == dtype for t in found)
    assert_near([found[0]], [wanted[0]], torch.finfo(dtype).eps)
    assert_near(found[1:], wanted[1:], 2 * torch.finfo(dtype).eps)  # the upstream gradient is rounded as well


@pytest.mark.parametrize("pdrop", [0.1, 0.5])
def test_dropout_is_that_of_the_blocks(pdrop):
    """The same seed drops the same weights with a compiler and without."""
    tensors, mask = sample(SIZES["whole tiles"]), rule(SIZES["whole tiles"])
    results = []
    for way in (
        lambda *a: in_cpp(*a, mask, pdrop=pdrop),
        lambda *a: by(Blocked())(*a, mask, pdrop=pdrop),
    ):
        torch.manual_seed(5)
        results.append((*both_ways(way, tensors), torch.randn(3)))
    assert_near(*results)


@each_size
def test_threads_change_nothing(sizes):
    results = []
    for n_thread in (1, 2, 5):
        torch.manual_seed(0)
        torch.set_num_threads(n_thread)
        results.append(both_ways(lambda *a: in_cpp(*a, rule(sizes), pdrop=0.1), sample(sizes)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_heads_may_lie_anywhere():
    """Parts of one projection, heads before time, every second number: read where they are, or copied."""
    sizes = B, L, _, H, K, E, V = SIZES["several tiles, MQA"]
    joined = torch.randn(B, L, H * E + K * (E + V), dtype=torch.float32)
    parts = joined.split([H * E, K * E, K * V], dim=-1)
    tensors = [part.unflatten(-1, (n, -1)) for part, n in zip(parts, (H, K, K), strict=True)]
    wanted = kernels.reference(*(t.double() for t in tensors), rule(sizes).dense())
    for lay in (
        lambda t: t,
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
    ):
        assert_near([in_cpp(*map(lay, tensors), rule(sizes))], [wanted])
    leaves = [t.detach().requires_grad_() for t in tensors]
    in_cpp(*leaves, rule(sizes)).sum().backward()  # an upstream gradient of stride 0
    exact = [t.detach().double().requires_grad_() for t in tensors]
    kernels.reference(*exact, rule(sizes).dense()).sum().backward()
    assert_near([t.grad for t in leaves], [t.grad for t in exact])


def test_what_is_no_number_stays_none_and_what_is_hidden_stays_hidden():
    sizes = SIZES["whole tiles"]
    query, key, value = sample(sizes)
    key[:, -5:] = float("nan")
    out = in_cpp(query, key, value, rule(sizes, window=20))
    assert out[:, :-5].isfinite().all()
    assert out[:, -5:].isnan().all()


def test_large_scores_do_not_overflow():
    tensors, mask = [t * 60 for t in sample(SIZES["odd"])], rule(SIZES["odd"])
    wanted = kernels.reference(*(t.double() for t in tensors), mask.dense())
    assert_near([in_cpp(*tensors, mask)], [wanted], 3e-5)


@pytest.mark.process
def test_torch_sees_the_operators():
    """Whoever watches what is dispatched; and without PyTorch's compiler, which takes seconds to import."""
    script = """
import sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
from rehead.native import sequence
seen = []
class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        seen.append(str(op))
        return op(*args, **(kwargs or {}))
x = torch.randn(1, 9, 2, 4, requires_grad=True)
sequence.attend(*[torch.randn(1, 9, 2, 4)] * 3, None, True, 0, 0, 0.5)
print("torch._dynamo" in sys.modules)
with Watch():
    sequence.gelu(sequence.attend(x, x, x, None, True, 0, 0, 0.5)).sum().backward()
print(*(name for name in seen if name.startswith("rehead")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = ("attend", "gelu", "gelu_backward", "attend_backward")
    assert done.stdout.splitlines() == ["False", " ".join(f"rehead.{name}.default" for name in names)]


def test_second_derivatives_are_refused():
    tensors = [t.requires_grad_() for t in sample(SIZES["odd"])]
    out = in_cpp(*tensors, rule(SIZES["odd"])).square().sum()
    first = torch.autograd.grad(out, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first[0].square().sum().backward()


# When it is taken


def test_who_takes_it(monkeypatch, switch):
    took, real = [], native.attend
    monkeypatch.setattr(native, "attend", lambda *a: took.append(1) or real(*a))

    def takes(n_query=40, n_key=40, dtype=torch.float32, grad=False, n_kv=2, pdrop=0.0, **rest):
        took.clear()
        tensors = sample((1, n_query, n_key, 2, n_kv, 8, 8), dtype)
        tensors[1].requires_grad_(grad)
        mask = Mask(n_query=n_query, n_key=n_key, **rest)
        with torch.set_grad_enabled(grad):
            kernels.attend(*tensors, mask, pdrop=pdrop)
        return bool(took)

    assert takes()
    assert takes(grad=True)
    assert takes(pdrop=0.1, n_query=2)
    assert not takes(window=3 * compiled.LONGEST, n_key=2 * compiled.LONGEST)  # which hides nothing
    assert takes(causal=False)
    assert takes(window=9, n_key=2 * compiled.LONGEST)
    assert takes(n_key=2 * compiled.LONGEST, pdrop=0.1)
    assert not takes(n_key=2 * compiled.LONGEST)
    assert not takes(n_query=2)  # folded
    assert not takes(key_positions=torch.arange(40)[None])
    assert not takes(dtype=torch.float64)
    assert takes(dtype=torch.bfloat16, grad=True)
    torch.set_num_threads(2)
    assert not takes(n_kv=1, grad=True)  # a thread would have nothing to do
    assert takes(n_kv=1)
    assert not takes(n_query=30, n_kv=1)  # one tile
    for dropped in (takes(n_kv=1, grad=True, pdrop=0.1), takes(n_query=30, n_kv=1, pdrop=0.1)):
        assert dropped  # or the number of threads would decide which weights are
    with monkeypatch.context() as patch:
        patch.setattr("torch.compiler.is_compiling", lambda: True)
        assert not takes()
    switch("0")
    assert not takes()


def test_sizes_that_do_not_fit_are_refused():
    query, key, value = sample(SIZES["odd"])
    draws = torch.zeros(3, 6, 45, 77, dtype=torch.int16)
    for bad in (
        (query, key[:1], value[:1]),
        (query, key, value[:, 1:]),
        (query, key[..., 1:], value),
        (query[:, :, :4], key, value),
        (query.double(), key, value),
        (query, key[:, :40], value[:, :40]),
        (query, key[:, :0], value[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"fit|float32|keys"):
            native.attend(*bad, None, True, 0, 0, 1.0)
    for bad in (draws[:2], draws[..., 1:], draws.int(), draws.transpose(0, 1).contiguous().transpose(0, 1)):
        with pytest.raises(ValueError, match="draws"):
            native.attend(query, key, value, bad, True, 0, 5, 1.0)


@pytest.mark.mistyped
@torch.no_grad()
@pytest.mark.parametrize(
    ("n_query", "n_key", "window", "dtype"),
    [(20, 700, None, torch.float64), (600, 600, 8, torch.float32), (600, 600, 8, torch.float64)],
    ids=["after a long past", "window", "window, float64"],
)
def test_one_causal_context_for_several_texts(n_query, n_key, window, dtype):
    """Kernels that would walk beyond the keys, or pair heads wrongly, refuse it."""
    query, key, value = (
        torch.randn(b, n, h, 8, dtype=dtype) for b, n, h in ((3, n_query, 4), (1, n_key, 2), (1, n_key, 2))
    )
    mask = Mask(n_query=n_query, n_key=n_key, window=window)
    wanted = kernels.attend(query, *(x.expand(3, -1, -1, -1) for x in (key, value)), mask)
    torch.testing.assert_close(kernels.attend(query, key, value, mask), wanted)


@pytest.mark.mistyped
def test_dropped_weights_of_one_context_for_several_texts():
    """Which neither C++ nor blocks take."""
    query, key = torch.randn(3, 40, 4, 8), torch.randn(1, 50, 2, 8)
    kept = kernels.attend(
        query, key, torch.ones_like(key), Mask(n_query=40, n_key=50, causal=False), pdrop=0.5
    )
    assert abs(kept.mean().item() - 1) < 0.05


def test_one_context_for_several_texts():
    """Keys of one sequence for queries of several go another way, as a user without shape checks calls it."""
    code = """
import torch
from rehead.attention.kernels import Call, attend, reference
from rehead.attention.kernels.compiled import Compiled
from rehead.attention.mask import Mask
query, key, value = torch.randn(3, 40, 4, 8), torch.randn(1, 50, 2, 8), torch.randn(1, 50, 2, 8)
mask = Mask(n_query=40, n_key=50, causal=False)
print(Compiled().refuses(Call(query, key, value, mask, 1.0)))
wanted = reference(query, key.expand(3, -1, -1, -1), value.expand(3, -1, -1, -1))
print(torch.allclose(attend(query, key, value, mask), wanted, atol=1e-5))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["keys are shared by several sequences", "True"]


@pytest.mark.parametrize("sizes", [(0, 9, 9, 2, 2, 4, 4), (2, 0, 9, 2, 2, 4, 4), (2, 9, 0, 2, 2, 4, 4)])
def test_nothing_is_computed_of_nothing(sizes):
    tensors, mask = sample(sizes), rule(sizes, causal=False)
    call = kernels.Call(*tensors, mask, 1.0, pdrop=0.1)
    assert compiled.Compiled().refuses(call) == "nothing to compute"
    if sizes[2]:
        assert in_cpp(*tensors, mask).shape == (*sizes[:2], 2, 4)


def test_some_inputs_learn():
    tensors, mask = sample(SIZES["odd"]), rule(SIZES["odd"])
    wanted = both_ways(lambda *a: kernels.reference(*a, mask.dense()), [t.double() for t in tensors])
    torch.manual_seed(3)
    upstream = torch.randn(wanted[0].shape).float()
    for index in range(3):
        leaves = [t.clone().requires_grad_(at == index) for at, t in enumerate(tensors)]
        found = torch.autograd.grad(in_cpp(*leaves, mask), leaves[index], upstream)
        assert_near(found, [wanted[1 + index]], 3e-6)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*torch.jit"
)  # a FutureWarning from 2.14; PyTorch imports torch.jit for it
def test_forward_derivatives_are_not_lost():
    """PyTorch's own attention on a CPU has none, and says so."""
    query, key, value = sample(SIZES["whole tiles"])
    with pytest.raises(NotImplementedError, match="forward AD"):
        torch.func.jvp(
            lambda q: kernels.attend(q, key, value, rule(SIZES["whole tiles"])), (query,), (query,)
        )


def test_heads_of_one_number():
    query, key, value = (torch.randn(2, 20, 1, 3, dtype=torch.float32).transpose(2, 3) for _ in range(3))
    mask = Mask(n_query=20, n_key=20)
    wanted = kernels.reference(query.double(), key.double(), value.double(), mask.dense())
    assert_near([in_cpp(query, key, value, mask)], [wanted])


def test_switched_off_it_says_so(switch):
    switch("0")
    with pytest.raises(KernelUnavailable, match="switched off"):
        in_cpp(*sample(SIZES["odd"]), rule(SIZES["odd"]))


# GELU


@pytest.mark.parametrize("shape", [(0,), (1,), (16,), (3, 5, 7), (40, 33)])
@pytest.mark.parametrize("n_thread", [1, 2])
def test_gelu(shape, n_thread):
    torch.set_num_threads(n_thread)
    x = torch.randn(shape) * 4
    wanted = both_ways(lambda t: F.gelu(t, approximate="tanh"), [x])
    assert_near(both_ways(native.gelu, [x.float()]), wanted)
    if x.numel() > 1:
        with pytest.raises(AssertionError):
            assert_near(both_ways(native.gelu, [x.float()]), both_ways(F.gelu, [x]))  # erf


def test_gelu_has_second_derivatives():
    x = torch.randn(40)

    def second(way, x):
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(way(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)

    wanted = second(lambda t: F.gelu(t, approximate="tanh"), x)
    assert_near(second(native.gelu, x.float()), wanted, 1e-5)


def test_gelu_far_out():
    x = torch.tensor([-1e4, -88.0, -12.0, -1e-30, 0.0, 1e-30, 12.0, 88.0, 1e4])
    out, slope = both_ways(native.gelu, [x.float()])
    wanted = both_ways(lambda t: F.gelu(t, approximate="tanh"), [x])
    torch.testing.assert_close(out.double(), wanted[0], rtol=1e-6, atol=1e-30)
    assert_near([slope], [wanted[1]])
    assert native.gelu(torch.tensor([float("nan")], dtype=torch.float32)).isnan().all()


def test_gelu_of_a_transposed_tensor():
    x = torch.randn(5, 40, dtype=torch.float32).T
    assert_near([native.gelu(x)], [F.gelu(x.double(), approximate="tanh")])


def test_who_takes_gelu(monkeypatch):
    took = []
    real = native.gelu
    monkeypatch.setattr(native, "gelu", lambda x: took.append(1) or real(x))
    x = torch.randn(3, 4, dtype=torch.float32)
    gelu(x)
    gelu(x.double().requires_grad_())
    assert not took
    gelu(x.requires_grad_())
    assert took == [1]


def test_both_sides_mean_the_same_sizes():
    source = (HERE / "sequence.cpp").read_text()
    for struct, fields in (("Sizes", native.Sizes._fields_), ("Array", native.Array._fields_)):
        declared = re.sub("//.*", "", source.split(f"struct {struct} {{")[1].split("}")[0])
        assert re.findall(r"(\w+)[,;]", declared) == [name for name, _ in fields]
    assert native.kernel().sizes_size() == ctypes.sizeof(native.Sizes)
