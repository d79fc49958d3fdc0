"""The contract of the kernels: each computes what the definition does, in every dtype that it takes, or refuses.

Every call of the roster's kernels is held against the reference in float64 (itself against loops in NumPy, in
tests/attention/test_kernels.py).
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from calls import by
from rehead.attention import kernels
from rehead.attention.kernels import Call, compiled, continued, windowed
from rehead.attention.kernels.definition import Reference
from rehead.attention.kernels.folded import Folded
from rehead.attention.kernels.sdpa import SDPA
from rehead.attention.kernels.windowed import Windowed
from rehead.attention.mask import EMPTY, Mask
from rehead.attention.score import Additive
from rehead.native import KernelUnavailable
from rehead.native import sequence as native

BUDGETS = {torch.float64: (1e-12, 1e-11), torch.float32: (4e-6, 4e-5), torch.bfloat16: (4e-2, 8e-2)}
"""Error relative to the largest number, of outputs and of gradients.

What cancels in a gradient is as far off as what it is made of.
"""
ON_A_CPU = [
    kernel for kernel in kernels.ROSTER if kernel.name != "flash"
]  # tests/attention/test_flash.py has it
HAS_CPP = not isinstance(native.kernel(), KernelUnavailable)
SIZES = {"B": 3, "L": 4, "S": 9, "H": 10, "K": 2, "E": 6, "V": 7}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Thresholds low enough that small calls reach every kernel."""
    monkeypatch.setattr(continued, "LONG", 3)
    monkeypatch.setattr(windowed, "LONG", 7)
    monkeypatch.setattr(windowed, "CHUNK", 4)
    monkeypatch.setattr(compiled, "LONGEST", 24)


def sample(dtype=torch.float64, **sizes):
    """Queries, keys and values."""
    sizes = SIZES | sizes
    return [
        torch.randn([sizes[letter] for letter in letters], dtype=dtype)
        for letters in ("BLHE", "BSKE", "BSKV")
    ]


def made(mask, dtype=torch.float64, scale=0.3, score=None, seed=1, learns=False, **sizes):
    """A call of random numbers."""
    sizes = SIZES | {"L": mask.n_query, "S": mask.n_key} | sizes
    random = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn([sizes[letter] for letter in letters], generator=random, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(learns)
        for letters in ("BLHE", "BSKE", "BSKV")
    ]
    if score is not None:
        torch.manual_seed(seed)
        score = Additive(width=3).build(sizes["K"], sizes["H"] // sizes["K"], sizes["E"]).to(dtype)
    return Call(*tensors, mask, scale, score)


@st.composite
def masks(draw):
    """Whole texts, chunks after a past, decoded tokens; windows; positions with padding and rows out of order."""
    n_query = draw(st.integers(1, 9) | st.just(30))
    n_key = n_query + draw(st.integers(0, 6))
    causal = draw(st.booleans()) or draw(st.booleans())
    positions = {}
    if draw(st.integers(0, 2)) == 0:
        row = st.integers(EMPTY, 8)
        for name, length in (("query_positions", n_query), ("key_positions", n_key)):
            n_row = draw(st.sampled_from([1, SIZES["B"]]))
            rows = draw(st.lists(row, min_size=n_row * length, max_size=n_row * length))
            positions[name] = torch.tensor(rows).reshape(n_row, length)
    window = draw(st.none() | st.integers(1, 9)) if causal else None
    return Mask(n_query=n_query, n_key=n_key, causal=causal, window=window, **positions)


@st.composite
def calls(draw):
    """What `made` takes: any mask, grouping and width, in any dtype, with a learned score or gradients or neither."""
    n_kv_head = draw(st.integers(1, 3))
    sizes = {"K": n_kv_head, "H": n_kv_head * draw(st.integers(1, 3)), "E": draw(st.integers(1, 5))}
    score = draw(st.sampled_from([None, None, None, "additive"]))
    given = {"dtype": draw(st.sampled_from(list(BUDGETS))), "learns": draw(st.booleans()), "score": score}
    return (
        given
        | sizes
        | {"mask": draw(masks()), "seed": draw(st.integers(0, 99)), "V": draw(st.integers(1, 5))}
    )


def results(attend, call):
    """The output and, where the inputs learn, the gradients of queries, keys and values."""
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in (call.query, call.key, call.value)]
    learns = tensors[0].requires_grad
    with torch.set_grad_enabled(learns):
        out = attend(*tensors, call.mask, scale=call.scale, score=call.score)
    if not learns:
        return [out]
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(out.dtype))]


def exact(call):
    """What the definition gives of the same numbers in float64."""
    doubled = [
        t.detach().double().requires_grad_(t.requires_grad) for t in (call.query, call.key, call.value)
    ]
    score = None
    if call.score is not None:
        score = Additive(width=3).build(
            call.key.shape[2], call.query.shape[2] // call.key.shape[2], call.key.shape[3]
        )
        score.load_state_dict(call.score.state_dict())

    def definition(query, key, value, mask, **rest):
        return kernels.reference(query, key, value, mask.dense(), **rest)

    return results(definition, Call(*doubled, call.mask, call.scale, score))


def check(attend, call):
    """`attend` computes the call within the budget of its dtype; a query that sees nothing gathers exactly 0."""
    found, wanted, dense = results(attend, call), exact(call), call.mask.dense()
    largest = max(1.0, *(float(t.abs().max()) for t in wanted))
    for ours, right, budget in zip(found, wanted, [0, 1, 1, 1], strict=False):
        assert ours.dtype == call.query.dtype
        assert ours.shape == right.shape
        assert (ours.double() - right).abs().max() <= BUDGETS[call.query.dtype][budget] * largest
    if call.query.dtype == torch.float64:
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-12, atol=1e-12)
    if dense is not None:
        assert not found[0][~dense.any(-1).expand(len(found[0]), -1)].any()


@settings(max_examples=200)
@given(wanted=calls())
def test_every_kernel_computes_what_it_does_not_refuse(wanted):
    call = made(**wanted)
    inputs = [t.detach().clone() for t in (call.query, call.key, call.value)]
    with torch.set_grad_enabled(call.query.requires_grad):
        taken = [kernel for kernel in ON_A_CPU if kernel.refuses(call) is None]
        chosen = kernels.choose(call)
    assert chosen.kernel is taken[0]
    assert list(chosen.against) == [kernel.name for kernel in kernels.ROSTER[: len(chosen.against)]]
    assert isinstance(taken[-1], Reference)
    for attend in (kernels.attend, *map(by, taken)):
        check(attend, call)
    assert all(map(torch.equal, inputs, (call.query, call.key, call.value)))


@pytest.mark.heavy
def test_no_kernel_is_never_chosen():
    """Of 600 calls as they come each kernel takes 10 at least, and is chosen for some."""
    takes, chosen = Counter(), Counter()

    @settings(max_examples=600, database=None)
    @given(wanted=calls(), pdrop=st.sampled_from([0.0, 0.0, 0.2]))
    def count(wanted, pdrop):
        call = replace(made(**wanted), pdrop=pdrop)
        with torch.set_grad_enabled(call.query.requires_grad):
            takes.update(kernel.name for kernel in kernels.ROSTER if kernel.refuses(call) is None)
            chosen[kernels.choose(call).kernel.name] += 1

    count()
    there = [kernel.name for kernel in ON_A_CPU if HAS_CPP or kernel.name != "C++"]
    assert {name: takes[name] for name in there if takes[name] < 10} == {}
    assert set(chosen) == set(there)


# Broken twins


def top_left(query, key, value, mask, *, scale=None, score=None):
    """SDPA's `is_causal` for a chunk after a past: its triangle begins at the wrong corner."""
    heads_first = (t.transpose(1, 2) for t in (query, key, value))
    return F.scaled_dot_product_attention(
        *heads_first, is_causal=True, scale=scale, enable_gqa=True
    ).transpose(1, 2)


def softmax_of_nothing(query, key, value, mask, *, scale=None, score=None):
    """Queries that see nothing spread their weight evenly."""
    dense = mask.dense()
    if dense is not None:
        dense = dense | ~dense.any(-1, keepdim=True)
    return kernels.reference(query, key, value, dense, scale=scale)


def heads_repeated_in_turn(query, key, value, mask, *, scale=None, score=None):
    """As the olympiad's modular map reads them."""
    group = query.shape[2] // key.shape[2]
    key, value = (t.repeat(1, 1, group, 1) for t in (key, value))
    return kernels.reference(query, key, value, mask.dense(), scale=scale)


TWINS = {
    "top left": (top_left, Mask(n_query=4, n_key=9)),
    "softmax of nothing": (
        softmax_of_nothing,
        Mask(n_query=2, n_key=3, key_positions=torch.full((1, 3), EMPTY)),
    ),
    "heads in turn": (heads_repeated_in_turn, Mask(n_query=9, n_key=9)),
    "its own scale": (lambda q, k, v, m, scale, score: kernels.attend(q, k, v, m), Mask(n_query=4, n_key=9)),
    "no window": (
        lambda q, k, v, m, **o: kernels.attend(q, k, v, Mask(n_query=9, n_key=9), **o),
        Mask(n_query=9, n_key=9, window=3),
    ),
    "off by one": (
        lambda q, k, v, m, **o: kernels.attend(q, k.roll(1, 1), v.roll(1, 1), m, **o),
        Mask(n_query=4, n_key=9),
    ),
    "another head's values": (
        lambda q, k, v, m, **o: kernels.attend(q, k, v.roll(1, 2), m, **o),
        Mask(n_query=1, n_key=9),
    ),
}


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("twin", TWINS)
def test_what_is_wrong_is_caught(twin, dtype):
    wrong, mask = TWINS[twin]
    call = made(mask, dtype)
    check(kernels.attend, call)
    with pytest.raises(AssertionError):
        check(wrong, call)


@pytest.mark.parametrize("kernel", ON_A_CPU, ids=lambda kernel: kernel.name)
def test_a_wrong_kernel_of_the_roster_is_caught(kernel):
    """Each as it is, and scaled by a tenth too much."""
    if kernel.name == "C++" and not HAS_CPP:
        pytest.skip(str(native.kernel()))
    call = made(Mask(n_query=4, n_key=9, window=3 if kernel.name == "windowed" else None), torch.float32)
    check(by(kernel), call)
    with pytest.raises(AssertionError):
        check(lambda *tensors, scale, score: by(kernel)(*tensors, scale=1.1 * scale), call)


# Closer still: as near as the reference of the same type


@pytest.mark.parametrize("kernel", [by(Folded()), by(SDPA())], ids=["folded", "sdpa"])
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


DTYPES = {  # budgets: max, mean, phi out, phi grads, u
    torch.float32: (1e-5, 1e-6, 3, 5, 1e-6),
    torch.bfloat16: (2.5e-2, 2.5e-3, 2, 4, 8e-3),
    torch.float16: (4e-3, 4e-4, 2, 4, 1e-3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "window"),
    [
        (by(Folded()), None),
        (by(Folded()), 5),
        (by(SDPA()), None),
        (by(SDPA()), 5),
        (by(Windowed()), 5),
    ],
)
def test_low_precision_keeps_the_budget(kernel, dtype, window, monkeypatch):
    """N14: a fast kernel is as near the float64 gold as the reference of the same type, outputs and gradients."""
    monkeypatch.setattr(windowed, "CHUNK", 8)
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
