"""Into a latent: exact at full rank, as good as can be below it."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion import Factor, PadRank
from rehead.conversion.base import Statistics
from rehead.conversion.fit.pair import Kept, kronecker_pair
from rehead.conversion.steps.latent import full_rank
from rehead.errors import ConfigError

D, C = 23, 13
GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, v_head_dim=5, qkv_bias=True)
MLA = LatentConfig(
    n_query_head=6,
    n_kv_head=2,
    kv_lora_rank=18,
    qk_nope_head_dim=4,
    v_head_dim=5,
    latent_norm=False,
    qkv_bias=True,
)


def weights_of(config, seed=0):
    torch.manual_seed(seed)
    return {name: 0.5 * torch.randn_like(weight) for name, weight in config.build(D).named_parameters()}


def output(config, weights, *inputs):
    module = config.build(D)
    module.load_state_dict(weights)
    with torch.no_grad():
        return module(*inputs)


def statistics_of(n, width=D, seed=0):
    """Of n inputs of uneven directions and n gradients."""
    torch.manual_seed(seed)
    x = torch.randn(n, width) * torch.linspace(0.05, 2, width)
    x, g = torch.cat([x, torch.ones(n, 1)], 1), torch.randn(n, 18) * torch.linspace(2, 0.05, 18)
    with tempfile.TemporaryDirectory() as folder:
        kept = Kept(Path(folder) / "kept")
        kept.add(x[:, :-1], g)
        return x, g, Statistics(inputs=x.mT @ x / n, pair=kronecker_pair(kept))


@pytest.mark.parametrize("method", ["", *Factor.methods])
@pytest.mark.parametrize("rope", [None, RopeConfig(), RopeConfig(layout="interleaved")])
def test_full_rank_is_exact_whatever_the_evidence(method, rope):
    """Also where a text of 3 tokens left most directions unseen."""
    source, result = replace(GQA, rope=rope), replace(MLA, rope=rope)
    weights, x = weights_of(source), torch.randn(3, 8, D)
    done = Factor().convert(weights, source, result, statistics_of(3)[2], method)
    torch.testing.assert_close(output(result, done.weights, x), output(source, weights, x))
    assert done.lost == 0


def test_cross_attention():
    """The context's width bounds the rank: a latent of C numbers is all there is to know of it."""
    source = replace(GQA, d_context=C, causal=False)
    assert full_rank(source, D) == C
    result = replace(MLA, d_context=C, causal=False, kv_lora_rank=C)
    assert Factor().promise(source, result, D).exact
    weights, x, y = weights_of(source), torch.randn(3, 7, D), torch.randn(3, 10, C)
    done = Factor().convert(weights, source, result, Statistics(), "")
    torch.testing.assert_close(output(result, done.weights, x, y), output(source, weights, x, y))


def keys_and_values(config, weights, x):
    """Per token, keys and values of all heads (N, K, E + V)."""
    if isinstance(config, LatentConfig):
        made = x @ weights["kv_a_proj_with_mqa.weight"].mT @ weights["kv_b_proj.weight"].mT
        return (made + weights["kv_b_proj.bias"]).unflatten(1, (2, -1))
    parts = [x @ weights[f"{name}.weight"].mT + weights[f"{name}.bias"] for name in ("k_proj", "v_proj")]
    return torch.cat([part.unflatten(1, (2, -1)) for part in parts], 2)


@pytest.mark.parametrize("rank", [1, 7, 17])
def test_each_method_is_best_by_its_own_measure(rank):
    """`svd` in the weights, `whitened` on the text, `weighted` by what each error does to its loss; biases stay."""
    x, g, statistics = statistics_of(60)
    weights, result = weights_of(GQA), replace(MLA, kv_lora_rank=rank)
    before = keys_and_values(GQA, weights, x[:, :-1])
    stack = torch.cat([weights["k_proj.weight"], weights["v_proj.weight"]])
    order = torch.cat([torch.arange(8).unflatten(0, (2, 4)), 8 + torch.arange(10).unflatten(0, (2, 5))], 1)
    measures = {"svd": {}, "whitened": {}, "weighted": {}}
    for method in Factor.methods:
        done = Factor().convert(weights, GQA, result, statistics, method)
        up = done.weights["kv_b_proj.weight"][order.flatten().argsort()]
        error = keys_and_values(result, done.weights, x[:, :-1]) - before
        matters = g[:, order.flatten()]
        measures["svd"][method] = float(
            (up @ done.weights["kv_a_proj_with_mqa.weight"] - stack).square().sum()
        )
        measures["whitened"][method] = float(error.square().sum())
        measures["weighted"][method] = float((error.flatten(1) * matters).sum(1).square().sum())
    for method, found in measures.items():
        assert min(found, key=found.get) == method, (method, found)


@pytest.mark.parametrize("method", Factor.methods)
def test_less_rank_never_loses_less(method):
    weights, statistics = weights_of(GQA), statistics_of(60)[2]
    lost = [
        Factor().convert(weights, GQA, replace(MLA, kv_lora_rank=rank), statistics, method).lost
        for rank in range(1, 19)
    ]
    assert lost == sorted(lost, reverse=True)
    assert 0 < lost[0] < 1
    assert lost[-1] == 0


def test_a_method_that_reads_a_text_needs_one(gpt):
    model = gpt(GQA)
    for method in ("whitened", "weighted"):
        with pytest.raises(
            ConfigError, match=r"reads a text. Give a calibration text, or use the method svd"
        ):
            rehead.convert(model, to="mla", kv_rank=7, method=method)
    rotary = gpt(replace(GQA, n_kv_head=GQA.n_query_head, rope=RopeConfig()))  # no latent to be narrowed
    with pytest.raises(ConfigError, match=r"reads a text. Give a calibration text, or use the method svd"):
        rehead.convert(rotary, to="mla", target="uneven", rope_dim=2, method="weighted")
    _, certificate = rehead.convert(model, to="mla", kv_rank=7)
    assert certificate.layers[0].methods == ["svd"]
    assert certificate.exact is False


def test_the_best_method_there_is_evidence_for(gpt, words):
    model = gpt(GQA, n_layer=1)
    _, certificate = rehead.convert(model, to="mla", kv_rank=7, calibration=words(200))
    assert certificate.layers[0].methods == ["weighted"]
    _, certificate = rehead.convert(model, to="mla", calibration=words(200))
    assert certificate.layers[0].methods == []  # nothing to approximate


def test_a_model_that_no_text_could_show_more_of(gpt, apart, words):
    """A text of one token: the rest of the directions is not lost altogether."""
    model = gpt(GQA, n_layer=1)
    result, _ = rehead.convert(model, to="mla", kv_rank=17, calibration=words(2))
    assert all(weight.isfinite().all() for weight in result.parameters())
    assert apart(model, result) < 1


@pytest.mark.parametrize("rope", [0, 6])
@pytest.mark.parametrize("rank", [10, 18])
def test_padding_with_zeros_is_exact_to_the_bit(rope, rank):
    """In front of a decoupled rotated part, which keeps its place."""
    source = replace(MLA, kv_lora_rank=9, qk_rope_head_dim=rope, rope=RopeConfig() if rope else None)
    result = replace(source, kv_lora_rank=rank)
    weights, x = weights_of(source), torch.randn(3, 8, D)
    done = PadRank().convert(weights, source, result, Statistics(), "")
    torch.testing.assert_close(
        output(result, done.weights, x), output(source, weights, x), rtol=1e-13, atol=1e-13
    )
    up, down = done.weights["kv_b_proj.weight"], done.weights["kv_a_proj_with_mqa.weight"]
    assert torch.equal(up[:, :9], weights["kv_b_proj.weight"])
    assert not up[:, 9:].any()
    assert not down[9:rank].any()
    if rope:
        at_the_end = torch.cat([weights["kv_a_proj_with_mqa.weight"], torch.zeros(rank - 9, D)])
        with pytest.raises(AssertionError):  # below the rotated part
            torch.testing.assert_close(
                output(result, done.weights | {"kv_a_proj_with_mqa.weight": at_the_end}, x),
                output(source, weights, x),
            )


def test_a_normed_latent_is_not_padded(gpt):
    normed = replace(MLA, latent_norm=True, kv_lora_rank=9)
    with pytest.raises(ConfigError, match=r"norm on its latent .*cannot be narrowed or expanded"):
        rehead.convert(gpt(normed), replace(normed, kv_lora_rank=12))
