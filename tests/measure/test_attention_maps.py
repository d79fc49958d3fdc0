"""Attention maps are what the model really attends with, and their figures are what they say."""

import math

import pytest
import torch

from rehead.config import ModelOptions
from rehead.errors import NumericError, UsageError
from rehead.measure.attention_maps import attention_maps, head_spread, prefix_change
from rehead.model import both_seen, build

SIZES = {"n_layer": 2, "n_query_head": 6, "n_embd": 36, "vocab_size": 19, "block_size": 16}
VARIANTS = {
    "mha": {},
    "gqa, rope": {"n_kv_head": 2, "rope": True},
    "mqa, window": {"n_kv_head": 1, "window": 3},
    "modular": {"n_kv_head": 3, "head_map": "modular"},
    "additive": {"score": "additive"},
    "mla": {"attention": "mla", "kv_lora_rank": 7, "qk_rope_head_dim": 4, "rope": True},
}


def model_of(variant):
    sizes = {name: SIZES[name] for name in ("n_layer", "n_query_head", "n_embd")}
    model = build(
        ModelOptions(**sizes, **VARIANTS[variant]).resolve(SIZES["vocab_size"], SIZES["block_size"])
    )
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_later_token_has_weight_and_each_row_sums_to_1(variant):
    maps = attention_maps(model_of(variant), torch.randint(19, (11,)))
    assert [tuple(one.shape) for one in maps] == [(6, 11, 11)] * 2
    for one in maps:
        torch.testing.assert_close(one.sum(-1), torch.ones(6, 11, dtype=torch.float32))
        assert (one.triu(1) == 0).all()
        assert not torch.allclose(one[0], one[1], atol=1e-3)


@pytest.mark.parametrize("variant", ["mha", "gqa, rope", "mqa, window", "modular"])
def test_maps_times_values_are_what_the_layer_attends_with(variant):
    model, seen = model_of(variant), []
    model.layers[1].self_attn.register_forward_hook(lambda module, given, out: seen.append((given[0], out)))
    weights = attention_maps(model, torch.randint(19, (11,)))[1].double()
    (x, out), attention = seen[0], model.layers[1].self_attn
    config = attention.config
    values = attention.v_proj(x)[0].unflatten(1, (config.n_kv_head, config.v_head_dim))
    reads = [
        head % config.n_kv_head if config.head_map == "modular" else head // config.group for head in range(6)
    ]
    gathered = torch.cat([weights[head] @ values[:, reads[head]] for head in range(6)], dim=1)
    torch.testing.assert_close(attention.o_proj(gathered), out[0], atol=1e-6, rtol=1e-5)


def test_a_window_hides_what_is_further_back():
    for one in attention_maps(model_of("mqa, window"), torch.randint(19, (11,))):
        assert (one.tril(-3) == 0).all()
        assert (one.diagonal(-2, dim1=1, dim2=2) > 0).all()


def test_the_model_is_left_as_it_was():
    model = model_of("mha").train()
    ids = torch.randint(19, (11,))
    first = attention_maps(model, ids)
    assert model.training
    assert torch.equal(first[1], attention_maps(model, ids)[1])  # no dropout
    assert not any(layer.self_attn._forward_pre_hooks for layer in model.layers)


def test_what_has_no_maps():
    with pytest.raises(UsageError, match=r"type rnn has no attention.*type gpt"):
        attention_maps(both_seen(), torch.tensor([0, 1]))
    model = model_of("mha")
    torch.nn.init.constant_(model.layers[1].self_attn.k_proj.weight, math.nan)
    with pytest.raises(NumericError, match="layer 1: attention weights are not finite"):
        attention_maps(model, torch.tensor([0, 1]))


def test_spread_of_known_weights():
    one, three_back = torch.eye(5), torch.eye(5).roll(1, 0)
    three_back[0] = one[0]
    halves = torch.tensor([[1, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]])
    assert head_spread(one[None]).entropy == [0.0]
    assert head_spread(one[None]).distance == [0.0]
    assert head_spread(three_back[None]).distance == pytest.approx([4 / 5])
    figures = head_spread(torch.stack([halves, torch.eye(3)]))
    assert figures.entropy == pytest.approx([2 / 3 * math.log(2), 0])
    assert figures.distance == pytest.approx([(0.5 * 1 + 0.5 * 2) / 3, 0])
    assert figures.even == pytest.approx([(math.log(2) + math.log(3)) / 3, (0.5 + 1) / 3])
    assert head_spread(torch.eye(3)[None], window=2).even == pytest.approx([2 / 3 * math.log(2), 2 / 3 * 0.5])
    assert head_spread(torch.ones(1, 1, 1)).even == (0.0, 0.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_c2_rows_of_a_shared_prefix_are_unchanged(variant):
    """Also where the prefix is longer than the window."""
    model, ids = model_of(variant), torch.randint(19, (11,))
    first, second = attention_maps(model, ids[:7]), attention_maps(model, ids)
    assert max(prefix_change(first, second, 7)) < 1e-6
    other = attention_maps(model, torch.cat([(ids[:1] + 1) % 19, ids[1:]]))
    assert max(prefix_change(first, other, 7)) > 1e-3


def test_weight_beyond_the_prefix_is_a_change():
    first, second = torch.eye(3)[None], torch.eye(4)[None]
    assert prefix_change([first], [second], 3) == [0.0]
    second[0, 1, 3] = 0.25
    assert prefix_change([first, first], [second, torch.eye(4)[None]], 3) == [0.25, 0.0]
    assert prefix_change([second], [first], 3) == [0.25]
    second[0, 1, 3], second[0, 2, 0] = 0, 0.5
    assert prefix_change([first], [second], 3) == prefix_change([second], [first], 3) == [0.5]
