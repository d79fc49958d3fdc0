"""Out of a latent: on the keys' side (expand) and on the queries' (reduce)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion import Expand, Reduce, path
from rehead.conversion.base import Statistics
from rehead.errors import ConfigError

D, C = 23, 13
MLA = LatentConfig(
    n_query_head=6, n_kv_head=3, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, latent_norm=False
)


def weights_of(config, seed=0):
    torch.manual_seed(seed)
    return {name: 0.5 * torch.randn_like(weight) for name, weight in config.build(D).named_parameters()}


def output(config, weights, *inputs, **options):
    module = config.build(D)
    module.load_state_dict(weights)
    with torch.no_grad():
        return module(*inputs, **options)


def converted(conversion, config, weights):
    (result,) = conversion.steps(config, config, D)
    assert conversion.refusal(config) == ""
    assert conversion.promise(config, result, D).exact
    done = conversion.convert(weights, config, result, Statistics(), "")
    assert done.lost == 0
    return result, done.weights


@pytest.mark.parametrize("conversion", [Expand, Reduce])
@settings(max_examples=12)
@given(
    st.sampled_from([1, 2, 3, 6]),
    st.integers(1, 11),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 5]),
    st.booleans(),
)
def test_same_output(conversion, n_kv_head, rank, qkv_bias, o_bias, window, crosses):
    """Any heads, rank, biases and window; to itself and to a context of another width."""
    config = replace(
        MLA, n_kv_head=n_kv_head, kv_lora_rank=rank, qkv_bias=qkv_bias, o_bias=o_bias, window=window
    )
    inputs = [torch.randn(2, 8, D)]
    if crosses:
        config = replace(config, window=None, causal=False, d_context=C)
        inputs.append(torch.randn(2, 10, C))
    weights = weights_of(config, rank)
    result, made = converted(conversion(), config, weights)
    expected = output(config, weights, *inputs)
    torch.testing.assert_close(output(result, made, *inputs), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", ["half-split", "interleaved"])
def test_rebuilt_keys_are_expanded_and_rotated(layout):
    config = replace(MLA, rope=RopeConfig(layout=layout), qkv_bias=True)
    weights, x = weights_of(config), torch.randn(2, 8, D)
    result, made = converted(Expand(), config, weights)
    assert result.rope == config.rope
    torch.testing.assert_close(output(result, made, x), output(config, weights, x))


def test_where_the_biases_of_a_reduced_form_go():
    """The keys' adds one number to all of a query's scores; the values' comes out once, of each head."""
    config = replace(MLA, qkv_bias=True, o_bias=True)
    weights, x = weights_of(config), torch.randn(2, 8, D)
    result, made = converted(Reduce(), config, weights)
    expected = output(config, weights, x)

    def check(change):
        torch.testing.assert_close(output(result, made | change, x), expected)

    check({})
    bias = weights["kv_b_proj.bias"].unflatten(0, (3, 9))
    other_keys = weights | {"kv_b_proj.bias": torch.cat([bias[:, :4] + 7.0, bias[:, 4:]], 1).flatten()}
    torch.testing.assert_close(output(config, other_keys, x), expected)  # indeed
    for mutant in (
        {"o_proj.bias": weights["o_proj.bias"]},  # forgets the values'
        {"o_proj.bias": made["o_proj.bias"] - weights["o_proj.bias"]},  # forgets the output's
        {"q_proj.bias": torch.zeros_like(made["q_proj.bias"])},
        {"k_proj.bias": torch.ones_like(made["k_proj.bias"])},  # the latent is value too
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def test_the_values_bias_alone_makes_an_output_bias():
    config = replace(MLA, qkv_bias=True)
    result, made = converted(Reduce(), config, weights_of(config))
    assert result.o_bias
    assert made["o_proj.bias"].shape == (D,)


def test_padding_is_no_one_s_key():
    """Rows of shorter texts in a batch: what is seen gives the same output."""
    config = replace(MLA, qkv_bias=True)
    weights, x = weights_of(config), torch.randn(2, 5, D)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])
    for conversion in (Expand(), Reduce()):
        result, made = converted(conversion, config, weights)
        found, expected = (
            output(*pair, x, positions=positions) for pair in ((result, made), (config, weights))
        )
        seen = positions >= 0
        torch.testing.assert_close(found[seen], expected[seen])


def test_expanding_a_factored_model_is_the_model(gpt, apart):
    """There and back: GQA, MLA at full rank, GQA."""
    gqa = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True)
    model = gpt(gqa)
    mla, _ = rehead.convert(model, to="mla")
    back, certificate = rehead.convert(mla, to="gqa")
    assert back.config == model.config
    assert certificate.exact is True
    for weight, again in zip(model.parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(weight, again, rtol=1e-12, atol=1e-12)


REFUSED = {
    "latent norm": ({"latent_norm": True}, "latent_norm=True"),
    "query latent": ({"q_lora_rank": 7}, "q_lora_rank=7 has a norm"),
    "decoupled rope": ({"qk_rope_head_dim": 6, "rope": RopeConfig()}, "qk_rope_head_dim=6: its heads rotate"),
    "rebuilt keys": ({"rope": RopeConfig()}, "with rope=True, rebuilt keys are rotated between"),
}


@pytest.mark.parametrize(("change", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_multiplied_out(change, why):
    config = replace(MLA, **change)
    assert why in Reduce().refusal(config)
    assert (why in Expand().refusal(config)) == (change != {"rope": RopeConfig()})
    tied = GroupedConfig(n_query_head=6, n_kv_head=1, head_dim=9, tie_kv=True)
    with pytest.raises(ConfigError) as caught:
        path(config, tied, D)
    assert why in str(caught.value)
