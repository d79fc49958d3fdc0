"""The contract in the types that are used: texts by the compiled kernel, gradients, chunks, and one decoded token.

The other files of this folder compute in float64, which that kernel does not take.
"""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from one_layer import one_layer
from rehead.attention import kernels, scores, variants
from rehead.native import KernelUnavailable
from rehead.native import sequence as native

EXAMPLES = {name: config for variant in variants for name, config in variants[variant].examples().items()}
B, T, D = 2, 48, 13
CUTS = [0, 34, 43, 46, 47]  # more queries than a tile of the kernel has, fewer, and few; then a token alone

BUDGETS = {torch.float32: (2e-6, 2e-5), torch.bfloat16: (0.04, 0.04), torch.float16: (6e-3, 6e-3)}
"""RMS error over the RMS of what is exact, of outputs and of gradients.

About twice the largest measured over all examples on an x86-64 CPU: 1.1e-6 in float32, 8.5e-6 for the gradients of key
biases, which are exactly 0 without rope; 0.021 in bfloat16; 0.0031 in float16. The mildest of the broken twins, a
wrong scale, is off by 0.084.
"""

attend = kernels.attend
TWINS = {
    "mask off by one": lambda q, k, v, mask, **rest: attend(q, k.roll(-1, 1), v.roll(-1, 1), mask, **rest),
    "scale wrong by 10 %": lambda q, k, v, mask, **rest: attend(1.1 * q, k, v, mask, **rest),
    "heads scrambled": lambda q, k, v, mask, **rest: attend(q.roll(1, 2), k, v, mask, **rest),
}

each = pytest.mark.parametrize("name", EXAMPLES)
each_dtype = pytest.mark.parametrize("dtype", BUDGETS, ids=str)


def definition(query, key, value, mask, **rest):
    return kernels.reference(query, key, value, mask.dense(), **rest)


def case(name, dtype):
    """A layer, what it reads, what its gradients start from: all of `dtype`; and the same in float64."""
    torch.manual_seed(1)
    config = EXAMPLES[name]
    module, exact = config.build(D).eval(), config.build(D).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    module.to(dtype)
    exact.load_state_dict(module.state_dict())
    given = [torch.randn(B, T, D).to(dtype) for _ in range(2)]
    return (module, *given), (exact, *(part.double() for part in given))


def learned(module, x, upstream):
    """The output, and the gradients of x and of every weight."""
    leaves = {"x": x.clone().requires_grad_(), **dict(module.named_parameters())}
    out = module(leaves["x"])
    gradients = torch.autograd.grad(out, list(leaves.values()), upstream)
    return out.detach(), dict(zip(leaves, gradients, strict=True))


@torch.no_grad()
def in_chunks(module, x, prepared):
    """All from a cache; the last token by `forward`, or by its program."""
    cache = module.config.cache(B, dtype=x.dtype)
    parts = [module(x[:, a:b], cache=cache) for a, b in pairwise(CUTS)]
    last = one_layer(module)(x[:, -1], cache)[:, None] if prepared else module(x[:, -1:], cache=cache)
    return torch.cat([*parts, last], 1)


def rms(t):
    return t.double().square().mean().sqrt().item()


def errors(case, wanted):
    """What part, its RMS error, the RMS of what is exact: for all that a layer is used for, one after the other."""
    module, x, upstream = case
    out, gradients = learned(module, x, upstream)
    largest = max(map(rms, wanted[1].values()))
    yield "output in training", rms(out - wanted[0]), rms(wanted[0])
    for name, exact in wanted[1].items():  # what cancels is as far off as what it is made of
        yield f"gradient of {name}", rms(gradients[name] - exact), max(rms(exact), largest / 10)
    with torch.no_grad():
        yield "output", rms(module(x) - wanted[0]), rms(wanted[0])
    for prepared in (False, True):
        found, exact = in_chunks(module, x, prepared), wanted[0]
        yield f"chunks, prepared={prepared}", rms(found - exact), rms(exact)
        yield f"one token, prepared={prepared}", rms((found - exact)[:, -1]), rms(exact[:, -1])


def check(case, wanted, dtype):
    outputs, gradients = BUDGETS[dtype]
    for part, error, size in errors(case, wanted):
        assert error <= (gradients if "gradient" in part else outputs) * size, part


def exact_of(exact, monkeypatch):
    """By definition, in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "attend", definition)
        return learned(*exact)


def twins_of(name):
    """Those that change something: one head has no order, and the query's part of a concatenated score cancels."""
    if name == "gqa, concatenated":
        return ["mask off by one"]
    return [twin for twin in TWINS if twin != "heads scrambled" or EXAMPLES[name].n_map > 1]


@each_dtype
@each
def test_every_use_keeps_the_budget(name, dtype, monkeypatch):
    """Against the definition in float64, of the same weights; what is broken does not."""
    given, exact = case(name, dtype)
    wanted = exact_of(exact, monkeypatch)
    check(given, wanted, dtype)
    for twin in twins_of(name):
        monkeypatch.setattr(kernels, "attend", TWINS[twin])
        with pytest.raises(AssertionError):
            check(given, wanted, dtype)


class Seen(TorchDispatchMode):
    """How often each of our own operators ran."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rehead":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def compiled(given):
    """What ran in C++: a text in training and its gradients, a text, chunks; and whether the layer says so."""
    module, x, upstream = given
    with Seen() as training:
        learned(module, x, upstream)
    with Seen() as reading, torch.no_grad():
        module(x)
    with Seen() as chunks:
        in_chunks(module, x, prepared=False)
    ran = (training.calls["attend"], training.calls["attend_backward"], reading.calls["attend"])
    choice = module.choice(T)
    says = ran[2] > 0 if choice is None else choice.kernel.name == "C++"  # `choice` is optional
    return ran, chunks.calls["attend"] > 0, says


@pytest.mark.skipif(isinstance(native.kernel(), KernelUnavailable), reason=str(native.kernel()))
@each_dtype
@each
def test_it_is_the_compiled_kernel_that_keeps_it(name, dtype, switch):
    """All but learned scores, long chunks over keys with scales too; nothing is left without the compiler."""
    given, _ = case(name, dtype)
    config = EXAMPLES[name]
    ours = getattr(config, "score", None) in (None, scores["scaled_dot"]())
    assert compiled(given) == (((1, 1, 1), True, True) if ours else ((0, 0, 0), False, False))
    switch("0")
    assert compiled(given) == ((0, 0, 0), False, False)
