"""The Elman network of homework 1: B1-B4."""

from itertools import product
from pathlib import Path

import pytest
import torch

import rehead
from rehead.config import RNNConfig
from rehead.errors import ConfigError, UsageError
from rehead.generation import generate
from rehead.measure import cache_bytes, parameters
from rehead.model import RNN, both_seen, build
from rehead.model.rnn import ElmanLayer, slide

B, L, D, N, V = 3, 7, 5, 4, 6
CONFIG = {"vocab_size": V, "block_size": 8, "n_embd": D, "n_layer": 2, "n_hidden": N, "n_output": V}
EXAMPLE = Path(__file__).parents[2] / "examples" / "both-seen"
START = 2
"""A token that stands before the first; the binary alphabet is 0 and 1."""


def make(direction="forward", **changes):
    model = build(RNNConfig(**CONFIG | {"direction": direction} | changes))
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.5)
    return model.eval()


def tokens(batch=B, length=L):
    return torch.randint(V, (batch, length))


def check_both_seen(network):
    """All inputs of length 4: y_t is 1 exactly when both bits have been 1 by then."""
    sequences = torch.tensor(list(product(range(4), repeat=4)))
    bits = torch.stack([sequences // 2, sequences % 2], -1)
    wanted = (bits.cumsum(1) > 0).all(-1)
    assert torch.equal(network(sequences)[..., 0], wanted.to(network(sequences).dtype))


def test_b1_both_seen():
    check_both_seen(both_seen())


def test_b1_both_seen_from_its_folder():
    check_both_seen(rehead.load(EXAMPLE))


@pytest.mark.parametrize(
    "breaks",
    [
        lambda net: net.head.bias.data.fill_(0),  # either
        lambda net: net.layers[0].h_proj.weight.data.zero_(),  # both at once
        lambda net: net.layers[0].h_proj.weight.data.mul_(0.5),  # forgets
        lambda net: setattr(net.layers[0], "activation", torch.tanh),
        lambda net: setattr(net, "output", lambda a: a),
        lambda net: net.embed_tokens.weight.data.copy_(net.embed_tokens.weight.data.roll(1, 0)),
    ],
)
def test_b1_broken_detectors_are_caught(breaks):
    network = both_seen()
    breaks(network)
    with pytest.raises(AssertionError):
        check_both_seen(network)


def test_slide():
    assert slide(torch.tensor([-2.0, 0.0, 0.25, 1.0, 7.0])).tolist() == [0, 0, 0.25, 1, 1]


def by_definition(model, ids):
    """h_t = f(W_hh h_{t-1} + W_hx x_t + b_h), layer on layer; y_t = W_yh h_t + b_y."""
    f = {"tanh": torch.tanh, "slide": lambda a: a.clip(0, 1)}[model.config.activation]
    x = model.embed_tokens.weight[ids]
    for layer in model.layers:
        h, states = torch.zeros(len(ids), N), []
        for t in range(ids.shape[1]):
            h = f(h @ layer.h_proj.weight.T + x[:, t] @ layer.x_proj.weight.T + layer.x_proj.bias)
            states.append(h)
        x = torch.stack(states, 1)
    return x @ model.head.weight.T + model.head.bias


@pytest.mark.parametrize("activation", ["tanh", "slide"])
def test_elman_network_is_its_definition(activation):
    model, ids = make(activation=activation), tokens()

    def check():
        torch.testing.assert_close(model(ids), by_definition(model, ids), rtol=1e-12, atol=1e-12)

    check()
    for layer in model.layers:
        layer.activation = torch.relu
    with pytest.raises(AssertionError):
        check()


class Forgets(ElmanLayer):
    """Starts every call from zero."""

    def forward(self, x, state=None, padding=None):
        return super().forward(x, None, padding)


@pytest.mark.parametrize("activation", ["tanh", "slide"])
@pytest.mark.parametrize("cuts", [[1] * L, [3, 4], [2, 1, 1, 3]])
def test_b2_stepping_is_one_pass(activation, cuts):
    model, ids = make(activation=activation), tokens()

    def check():
        cache = model.new_cache(B)
        parts = [model(part, cache=cache) for part in ids.split(cuts, 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids), rtol=1e-12, atol=1e-12)

    check()
    for layer in model.layers:
        layer.__class__ = Forgets
    with pytest.raises(AssertionError):
        check()


def test_b2_the_state_does_not_grow():
    model, sizes = make(), []
    cache = model.new_cache(B)
    for _ in range(5):
        model(tokens(), cache=cache)
        sizes.append(sum(layer.n_bytes for layer in cache))
    assert sizes == [cache_bytes(model.config, 99, B, torch.float64)] * 5 == [B * 2 * N * 8] * 5


@torch.no_grad()
def test_the_cache_holds_the_last_state_alone():
    model = make()
    cache = model.new_cache(B)
    model(tokens(), cache=cache)
    assert [kept.state.untyped_storage().nbytes() for kept in cache] == [kept.n_bytes for kept in cache]


def test_padding_leaves_the_state_alone():
    """A row padded on the right, or on the left, ends in the state it has alone."""
    model, ids = make(), tokens()
    alone = model.hidden(ids[:, :4])[:, -1]
    right = torch.tensor([[0, 1, 2, 3, -1, -1, -1]])
    left = torch.tensor([[-1, -1, -1, 0, 1, 2, 3]])
    torch.testing.assert_close(model.hidden(ids, right)[:, -1], alone)
    torch.testing.assert_close(model.hidden(torch.cat([ids[:, 4:], ids[:, :4]], 1), left)[:, -1], alone)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model.hidden(ids)[:, -1], alone)


def total(model):
    """The sum over all binary strings x of length 3 of the product of p(x_t | what stands before)."""
    strings = torch.tensor([[START, *bits] for bits in product(range(2), repeat=3)])
    likely = model(strings)[..., :2].softmax(-1)[:, :-1]
    return likely.gather(2, strings[:, 1:, None]).prod(1).sum().item()


@pytest.mark.parametrize("activation", ["tanh", "slide"])
@pytest.mark.parametrize("direction", ["forward", "prefix"])
def test_b3_b4_forward_and_prefix_are_distributions(direction, activation):
    for _ in range(5):
        assert total(make(direction, activation=activation)) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("activation", ["tanh", "slide"])
def test_b3_bidirectional_is_none(activation):
    """1.2a: h_{t-1} has read x_t, so the product over t is no distribution."""
    assert max(abs(total(make("bidirectional", activation=activation)) - 1) for _ in range(5)) > 1e-3


def test_b3_bidirectional_is_refused_generation():
    with pytest.raises(UsageError) as caught:
        generate(make("bidirectional"), tokens(), 2)
    assert "has read the tokens from t on" in str(caught.value)
    assert "direction=forward" in str(caught.value)


def test_b4_prefix_generates():
    model, ids = make("prefix"), tokens()
    out = generate(model, ids, 3, 0, use_cache=False)
    for length in range(L, L + 3):
        assert torch.equal(model(out[:, :length])[:, -1].argmax(-1), out[:, length])
    with pytest.raises(UsageError, match="use_cache=False"):
        generate(model, ids, 3, 0)


def test_b4_prefix_reads_both_ways_over_each_prefix():
    """Token t's state is the bidirectional network's last state on the first t tokens."""
    prefix, both, ids = make("prefix"), make("bidirectional"), tokens()
    both.load_state_dict(prefix.state_dict())
    for t in range(1, L + 1):
        torch.testing.assert_close(prefix(ids)[:, t - 1], both(ids[:, :t])[:, -1])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(prefix(ids), both(ids))


def test_bidirectional_is_its_definition():
    """f_t from the left, g_t from the right, h_t = tanh(W [f_t; g_t] + b)."""
    model, ids = make("bidirectional", n_layer=1), tokens()
    x = model.embed_tokens.weight[ids]
    ahead, behind = model.layers[0](x), model.backward_layers[0](x.flip(1)).flip(1)
    h = torch.tanh(torch.cat([ahead, behind], -1) @ model.merge.weight.T + model.merge.bias)
    torch.testing.assert_close(model(ids), h @ model.head.weight.T + model.head.bias)


@pytest.mark.parametrize("direction", ["bidirectional", "prefix"])
def test_whole_sequence_directions_take_no_cache_and_no_padding(direction):
    model = make(direction)
    for call in (
        lambda: model(tokens(), cache=model.new_cache(B)),
        lambda: model(tokens(), torch.arange(L)[None]),
    ):
        with pytest.raises(UsageError, match=f"direction={direction} reads whole sequences"):
            call()


def test_a_detector_is_refused_generation():
    with pytest.raises(UsageError) as caught:
        generate(both_seen(), torch.zeros(1, 1, dtype=torch.long), 1)
    assert "n_output=1 does not match vocab_size=4" in str(caught.value)


@pytest.mark.parametrize("direction", ["forward", "bidirectional", "prefix"])
@pytest.mark.parametrize("n_layer", [1, 2, 3])
def test_parameters_are_counted(direction, n_layer):
    model = make(direction, n_layer=n_layer, n_output=9)
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("n_layer", [0, -1, 1025])
def test_refused_numbers_of_layers(n_layer):
    with pytest.raises(ConfigError, match=f"n_layer={n_layer}. Use 1 to 1024"):
        RNNConfig(**CONFIG | {"n_layer": n_layer})


@pytest.mark.parametrize("name", ["n_hidden", "n_output", "n_embd", "vocab_size", "block_size"])
def test_refused_sizes(name):
    with pytest.raises(ConfigError, match=f"{name}=0: a size is a whole number of at least 1"):
        RNNConfig(**CONFIG | {name: 0})


def test_built_by_its_config():
    assert isinstance(make(), RNN)
