"""A model in the hands of PyTorch's transforms: torch.func and FakeTensorMode, which know PyTorch's operators only."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from rehead.attention import GroupedConfig, RopeConfig
from rehead.model import build
from rehead.native import KernelUnavailable, sequence
from small import llama_shaped

GQA = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=8, rope=RopeConfig())
CONFIG = llama_shaped(GQA, GQA, vocab_size=23, n_embd=16, n_hidden=20)
CLASSIC = llama_shaped(
    GQA, vocab_size=23, n_embd=16, n_hidden=20, mlp="gelu", norm="layernorm", learned_positions=True
)
HAS_CPP = not isinstance(sequence.kernel(), KernelUnavailable)
each = pytest.mark.parametrize("config", [CONFIG, CLASSIC], ids=["llama", "gpt2"])


@pytest.fixture(autouse=True)
def _single():
    torch.set_default_dtype(torch.float32)


def made(config, training=True):
    torch.manual_seed(0)
    return build(config).train(training), torch.randint(23, (3, 60))


@each
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_torch_func_are_those_of_autograd(config, dtype, training):
    model, ids = made(config, training)
    model = model.to(dtype)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, ids):
        return functional_call(model, weights, (ids,)).float().logsumexp(-1).mean()

    got = grad(loss)(weights, ids)
    loss(dict(model.named_parameters()), ids).backward()
    near = {"atol": 1e-6, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 3e-3, "rtol": 0.1}
    for name, weight in model.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, **near)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # PyTorch's own attention
def test_gradients_of_each_text():
    model, ids = made(CONFIG)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).logsumexp(-1).mean()

    each_text = vmap(grad(loss), in_dims=(None, 0))(weights, ids)
    alone = grad(loss)(weights, ids[1])
    for name, gradient in alone.items():
        torch.testing.assert_close(each_text[name][1], gradient, atol=1e-6, rtol=1e-4)


@each
@pytest.mark.parametrize("training", [True, False])
def test_shapes_are_known_without_numbers(config, training):
    with FakeTensorMode():
        model, ids = made(config, training)
        logits = model(ids)
        assert logits.shape == (3, 60, 23)
        if training:
            logits.sum().backward()
            assert model.head.weight.grad.shape == model.head.weight.shape


@torch.no_grad()
def test_a_traced_model_has_our_operators():
    model, ids = made(CONFIG, training=False)
    given = dict(model.named_parameters()), ids
    traced = make_fx(lambda weights, ids: functional_call(model, weights, (ids,)), tracing_mode="fake")(
        *given
    )
    torch.testing.assert_close(traced(*given), model(ids))
    assert not HAS_CPP or "rehead.attend" in traced.code
