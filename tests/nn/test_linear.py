"""Linear layers: the same function, computed by oneDNN in training and for many rows."""

import copy

import pytest
import torch
from torch import nn

from rehead.nn.few_rows import JoinedLinear
from rehead.nn.linear import Linear, WideLinear

onednn = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="oneDNN is used on x86 only"
)


@pytest.fixture
def _avx2(monkeypatch):
    """A CPU without products of 16 bits, whichever this one is."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)


def operators(layer, x):
    with torch.profiler.profile(acc_events=True) as profiled:  # torch 2.11 warns without
        layer(x)
    return {event.name for event in profiled.events()}


@onednn
@pytest.mark.parametrize("bias", [True, False])
def test_training_is_nn_linear(bias):
    """Outputs and gradients within float32's rounding of float64, as nn.Linear's."""
    layer = Linear(37, 53, bias=bias, dtype=torch.float32)
    plain = nn.Linear(37, 53, bias=bias, dtype=torch.float32)
    plain.load_state_dict(layer.state_dict())
    gold = copy.deepcopy(plain).double()
    x = torch.randn(3, 11, 37, dtype=torch.float32)
    assert "mkldnn::_linear_pointwise" in operators(layer, x)
    results = []
    for one in (layer, plain, gold):
        given = x.to(one.weight.dtype).requires_grad_()
        out = one(given)
        torch.manual_seed(1)
        gradient = torch.randn(out.shape, dtype=torch.float32).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, [given, *one.parameters()], gradient)])
    for ours, theirs, exact in zip(*results, strict=True):
        largest = exact.abs().max()
        assert (ours - theirs).abs().max() <= 1e-5 * largest
        assert (ours - exact).abs().max() <= 5 * max((theirs - exact).abs().max(), 1e-6 * largest)


@onednn
def test_training_has_second_derivatives():
    layer = Linear(37, 53, dtype=torch.float32)
    gold = copy.deepcopy(layer).double()
    x = torch.randn(3, 11, 37, dtype=torch.float32)
    results = []
    for one in (layer, gold):
        given = x.to(one.weight.dtype).requires_grad_()
        (first,) = torch.autograd.grad(one(given).pow(3).sum(), given, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [given, *one.parameters()]))
    for ours, exact in zip(*results, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()


@onednn
@pytest.mark.parametrize("bias", [True, False])
def test_many_rows_without_gradients(bias):
    layer = Linear(37, 53, bias=bias, dtype=torch.float32).eval()
    x = torch.randn(4, 16, 37, dtype=torch.float32)
    exact = nn.functional.linear(x.double(), *(weight.double() for weight in layer.parameters()))
    with torch.no_grad():
        assert "mkldnn::_linear_pointwise" in operators(layer, x)
        assert (layer(x) - exact).abs().max() <= 1e-6 * exact.abs().max()
        assert "mkldnn::_linear_pointwise" not in operators(layer, x[0, :15])
    assert "mkldnn::_linear_pointwise" not in operators(layer, x)


def test_everything_else_is_nn_linear_to_the_bit():
    x = torch.randn(3, 11, 37, dtype=torch.float32)
    layer = Linear(37, 53, dtype=torch.float32)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    assert torch.equal(layer.eval()(x), expected)
    assert "mkldnn::_linear_pointwise" not in operators(layer, x)
    with torch.no_grad():
        assert torch.equal(layer.train()(x), expected)
        assert "mkldnn::_linear_pointwise" not in operators(layer, x)
    assert "mkldnn::_linear_pointwise" not in operators(layer.double(), x.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer.float()(x).dtype == torch.bfloat16


def test_decoding_joins_them_as_it_joins_others():
    class Other(Linear):
        pass

    assert JoinedLinear(Linear(4, 3), nn.Linear(4, 5)).joined is not None
    assert JoinedLinear(Linear(4, 3), Other(4, 5)).joined is None


@pytest.mark.usefixtures("_avx2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 50), (64,)])
def test_narrow_dtypes_are_products_in_float32(monkeypatch, dtype, bias, shape):
    """As near to float64 as nn.Linear's, in every part of the weight; few rows are nn.Linear's."""
    monkeypatch.setattr("rehead.nn.rows.PART", 5 * 37 + 1)
    layer, plain = (kind(37, 53, bias=bias, dtype=dtype) for kind in (WideLinear, nn.Linear))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(*shape, 37, dtype=dtype)
    with torch.no_grad():
        ours, theirs = layer(x), plain(x)
        gold = copy.deepcopy(plain).double()(x.double())
        assert ours.dtype == dtype
        assert (ours - gold).abs().max() <= 1.01 * (theirs - gold).abs().max()
        assert (ours != theirs).double().mean() < 0.05
        assert torch.equal(layer(x.flatten(0, -2)[:63]), plain(x.flatten(0, -2)[:63]))
        assert "aten::_to_copy" in operators(layer, x)


@pytest.mark.usefixtures("_avx2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("shape", [(3, 50), (64,), (7,)])
def test_their_gradients_are_too(monkeypatch, dtype, bias, frozen, shape):
    """Rounded once from float64's, of inputs, weights and biases; frozen weights get none and keep no input."""
    monkeypatch.setattr("rehead.nn.rows.PART", 5 * 37 + 1)
    layer = WideLinear(37, 53, bias=bias, dtype=dtype).requires_grad_(not frozen)
    gold = copy.deepcopy(layer).double()
    x = torch.randn(*shape, 37, dtype=dtype)
    pull = torch.randn(*shape, 53, dtype=dtype)
    inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    for each, given in zip((layer, gold), inputs, strict=True):
        each(given).backward(pull.to(given.dtype))
    pairs = [(inputs[0].grad, inputs[1].grad)]
    pairs += [
        (one.grad, other.grad) for one, other in zip(layer.parameters(), gold.parameters(), strict=True)
    ]
    for one, other in pairs[: 1 if frozen else None]:
        assert one.dtype == dtype
        assert (one - other).abs().max() <= torch.finfo(dtype).eps * other.abs().max()
    assert not frozen or all(one is None for one, _ in pairs[1:])
    result = layer(inputs[0])  # kept: without it torch 2.11 frees what its node saved
    assert (result.grad_fn.saved_tensors[0] is None) is frozen


@pytest.mark.parametrize("has_them", [True, False])
def test_float16_has_instructions_of_its_own(monkeypatch, has_them):
    """AVX512 without FP16, such as AMD's, multiplies bfloat16 only; gradients of float16 took 46 times as long."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: has_them)
    layer, x = WideLinear(37, 53, dtype=torch.float16), torch.randn(99, 37, dtype=torch.float16)
    with torch.no_grad():
        assert ("aten::_to_copy" in operators(layer, x)) is not has_them


def test_processors_with_such_instructions_use_them(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    layer, x = WideLinear(37, 53, dtype=torch.bfloat16), torch.randn(99, 37, dtype=torch.bfloat16)
    with torch.no_grad():
        assert "aten::_to_copy" not in operators(layer, x)
