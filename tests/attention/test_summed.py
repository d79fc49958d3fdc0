"""The homework's sum form: what its handout writes, that it is MHA of the KV heads, and that it is not GQA (E19)."""

from dataclasses import replace

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, RopeConfig, SummedConfig
from rehead.config import ModelOptions
from rehead.errors import ConfigError
from rehead.model import build

B, L, D, H, K, E = 4, 11, 13, 6, 2, 10
SUMMED = SummedConfig(n_query_head=H, n_kv_head=K, head_dim=E)


def as_in_the_handout(module, x, scale=E**-0.5):
    """S_i = sum_j Q_ij K_i^T / sqrt(d_k), A_i = softmax(S_i), X_i = A_i V_i; heads concatenated, then W_O."""
    group = H // K
    outputs = []
    for i in range(K):
        key, value = (x @ p.weight[i * E : (i + 1) * E].T for p in (module.k_proj, module.v_proj))
        scores = 0
        for j in range(group):
            h = i * group + j
            query = x @ module.q_proj.weight[h * E : (h + 1) * E].T
            scores = scores + query @ key.transpose(1, 2) * scale
        scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), float("-inf"))
        outputs.append(scores.softmax(-1) @ value)
    return torch.cat(outputs, -1) @ module.o_proj.weight.T


def test_e19_it_is_what_the_handout_writes():
    module, x = SUMMED.build(D), torch.randn(B, L, D)
    assert module.o_proj.weight.shape == (D, K * E)  # width h_kv d_k
    torch.testing.assert_close(module(x), as_in_the_handout(module, x))
    assert not torch.allclose(module(x), as_in_the_handout(module, x, scale=(H * E / K) ** -0.5))


@pytest.mark.parametrize(
    "change", [{}, {"rope": RopeConfig()}, {"qkv_bias": True, "o_bias": True, "window": 4}]
)
def test_e19_it_is_mha_with_summed_queries(change):
    config = replace(SUMMED, **change)
    module, x = config.build(D), torch.randn(B, L, D)
    mha = config.equivalent().build(D)
    state = module.state_dict()
    for name in ("q_proj.weight", "q_proj.bias"):
        if name in state:
            state[name] = state[name].unflatten(0, (K, H // K, E)).sum(1).flatten(0, 1)
    mha.load_state_dict(state)
    assert (mha.config.name, mha.config.n_kv_head) == ("mha", K)
    torch.testing.assert_close(mha(x), module(x), rtol=1e-12, atol=1e-13)


def test_it_is_not_gqa():
    """The same queries, keys and values through a softmax for every query head differ, at any output projection."""
    x = torch.randn(B, L, D)
    module, gqa = SUMMED.build(D), GroupedConfig(n_query_head=H, n_kv_head=K, head_dim=E).build(D)
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(gqa, name).load_state_dict(getattr(module, name).state_dict())
    assert module.weights(x).shape[1] == K
    assert gqa.weights(x).shape[1] == H
    assert (gqa.weights(x).unflatten(1, (K, -1)).mean(2) - module.weights(x)).abs().max() > 0.01
    assert "gqa," not in SUMMED.describe()
    assert SUMMED.describe() == "gqa_sum, 6 queries summed to 2 heads of 10"


def test_b16_one_flag():
    options = ModelOptions(attention="gqa_sum", n_kv_head=3, rope=True, window=9, n_layer=2)
    layer = options.resolve(65, 128).attention[1]
    heads = {"n_query_head": 6, "n_kv_head": 3, "head_dim": 32}
    assert layer == SummedConfig(
        **heads, rope=RopeConfig(), window=9, attn_pdrop=0.1, qkv_bias=True, o_bias=True
    )
    for flags, message in (
        ({}, "model.attention=gqa_sum has no default for n_kv_head. Set model.n_kv_head"),
        ({"n_kv_head": 4}, "n_kv_head=4 does not divide n_query_head=6"),
        (
            {"n_kv_head": 3, "kv_lora_rank": 8},
            "model.kv_lora_rank=8 has no effect with model.attention=gqa_sum",
        ),
        (
            {"n_kv_head": 3, "score": "additive"},
            "model.score=additive has no effect with model.attention=gqa_sum",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            ModelOptions(attention="gqa_sum", **flags).resolve(65, 128)


@pytest.mark.parametrize("rope", [False, True])
def test_it_converts_exactly_to_mha_and_from_there_on(rope):
    model = build(ModelOptions(attention="gqa_sum", n_kv_head=3, rope=rope, n_layer=2).resolve(65, 32)).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.05)
    for to, steps, exact in (
        ("mha", ["sum-queries"], True),
        ("mla", ["sum-queries", "factor"], True),
        ("mqa", ["sum-queries", "pool-heads"], False),
    ):
        result, certificate = rehead.convert(model, to=to)
        assert certificate.layers[0].steps == steps
        assert certificate.layers[0].source.startswith("gqa_sum, 6 queries summed to 3")
        assert certificate.exact == exact
        assert (certificate.logits["relative_error"] < 1e-12) == exact
        assert result.config.attention[0].name == to
    with pytest.raises(ConfigError, match="cannot become 6"):
        rehead.convert(model, replace(model.config.attention[0].equivalent(), n_query_head=6, n_kv_head=6))
