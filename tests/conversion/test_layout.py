"""Permutations: heads into their groups, numbers of a head into their pairs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion import HeadMap, RopeLayout
from rehead.conversion.base import Statistics
from rehead.conversion.steps.layout import paired
from rehead.errors import ConfigError

D = 23


def numbered(config):
    """Weights that say where they come from: each row of the queries its head, each column of the output."""
    weights = {name: weight.detach() for name, weight in config.build(D).named_parameters()}
    heads = torch.arange(config.n_query_head, dtype=torch.float64)
    weights["q_proj.weight"] = heads.repeat_interleave(config.head_dim)[:, None].expand(-1, D)
    weights["o_proj.weight"] = heads.repeat_interleave(config.v_head_dim).expand(D, -1)
    return weights


def order(config):
    other = "contiguous" if config.head_map == "modular" else "modular"
    done = HeadMap().convert(numbered(config), config, replace(config, head_map=other), Statistics(), "")
    found = done.weights["q_proj.weight"][:: config.head_dim, 0]
    assert torch.equal(done.weights["o_proj.weight"][0, :: config.v_head_dim], found)
    return found.int().tolist()


def test_a5_the_table():
    """H = 12, G = 3: KV head 0 serves 0, 3, 6, 9, so these come first (E2)."""
    config = GroupedConfig(n_query_head=12, n_kv_head=3, head_dim=2, v_head_dim=5, head_map="modular")
    assert order(config) == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert order(replace(config, head_map="contiguous")) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]


@given(st.integers(1, 6), st.integers(1, 6))
def test_orders_are_inverse_and_trivial_for_mha_and_mqa(n_kv_head, group):
    """A8: at G = H and G = 1 both maps are one."""
    config = GroupedConfig(n_query_head=n_kv_head * group, n_kv_head=n_kv_head, head_dim=2, v_head_dim=3)
    there, back = order(config), order(replace(config, head_map="modular"))
    assert [there[head] for head in back] == list(range(n_kv_head * group))
    assert (there == sorted(there)) == (1 in (n_kv_head, group))
    # the head that lands in place h % K of the modular order read KV head h // group before
    assert all(head // group == place % n_kv_head for place, head in enumerate(there))


layouts = st.sampled_from(["half-split", "interleaved"])


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 4), layouts)
def test_pairs_move_and_come_back(heads, half, layout):
    rows = torch.randn(heads, 2 * half, 3)
    other = "half-split" if layout == "interleaved" else "interleaved"
    assert torch.equal(paired(paired(rows, layout), other), rows)
    first, second = (0, 1), (0, half)
    found = paired(rows, layout)
    before, after = (first, second) if layout == "half-split" else (second, first)
    assert torch.equal(found[:, list(after)], rows[:, list(before)])  # pair 0 is a pair still


def test_half_split_of_interleaved():
    rows = torch.tensor([0.0, 1, 2, 3, 4, 5])[None]
    assert paired(rows, "half-split")[0].tolist() == [0, 2, 4, 1, 3, 5]
    assert paired(rows, "interleaved")[0].tolist() == [0, 3, 1, 4, 2, 5]


GQA = GroupedConfig(
    n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, rope=RopeConfig(theta=50.0), qkv_bias=True
)
DEEPSEEK = LatentConfig(
    n_query_head=6,
    n_kv_head=3,
    kv_lora_rank=9,
    qk_nope_head_dim=4,
    qk_rope_head_dim=8,
    v_head_dim=5,
    q_lora_rank=11,
    rope=RopeConfig(theta=50.0),
    qkv_bias=True,
)
ROTATED = {
    "gqa": GQA,
    "rebuilt keys": replace(DEEPSEEK, qk_rope_head_dim=0, q_lora_rank=None),
    "deepseek": DEEPSEEK,
    "no query latent": replace(DEEPSEEK, q_lora_rank=None),
    "interleaved": replace(DEEPSEEK, rope=RopeConfig(theta=50.0, layout="interleaved")),
}


@pytest.mark.parametrize("config", ROTATED.values(), ids=ROTATED)
def test_exactly_the_rotated_rows_move(config):
    """The same output; with any one of the moved weights left where it was, another."""
    torch.manual_seed(0)
    module, x = config.build(D).requires_grad_(False), torch.randn(3, 8, D)
    for weight in module.parameters():
        weight.copy_(0.5 * torch.randn_like(weight))
    weights = dict(module.named_parameters())
    (result,) = RopeLayout().steps(config, config, D)
    moved = RopeLayout().convert(weights, config, result, Statistics(), "").weights
    other = result.build(D).requires_grad_(False)

    def check(change):
        other.load_state_dict(moved | change)
        torch.testing.assert_close(other(x), module(x))

    check({})
    changed = [name for name in weights if not torch.equal(weights[name], moved[name])]
    assert len(changed) >= 2
    for name in changed:
        with pytest.raises(AssertionError):
            check({name: weights[name]})


def test_a_learned_score_is_not_renumbered():
    """Its weights are per number of a head."""
    config = GroupedConfig(n_query_head=6, head_dim=4, rope=True, score="additive")
    assert "a learned score (Additive)" in RopeLayout().refusal(config)
    with pytest.raises(ConfigError, match="not renumbered with the heads"):
        rehead.conversion.path(config, replace(config, rope=RopeConfig(layout="interleaved")), D)
    assert RopeLayout().refusal(replace(config, score="scaled_dot")) == ""
