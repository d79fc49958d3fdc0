"""More KV heads by copies, fewer by pooling."""

from dataclasses import replace

import pytest
import torch

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, scores
from rehead.attention.rope_scaling import LinearScaling
from rehead.conversion import PoolHeads, RepeatHeads
from rehead.conversion.base import Statistics
from rehead.errors import ConfigError

D, C = 23, 13
MHA = GroupedConfig(n_query_head=6, head_dim=4, v_head_dim=5)
GQA = replace(MHA, n_kv_head=2)
ROPES = {
    "none": None,
    "half-split": RopeConfig(theta=50.0),
    "interleaved": RopeConfig(theta=50.0, layout="interleaved"),
    "scaled": RopeConfig(theta=50.0, scaling=LinearScaling(factor=2.0)),
}
ropes = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)


def weights_of(config, seed=0, width=D):
    torch.manual_seed(seed)
    module = config.build(width)
    return {name: 0.5 * torch.randn_like(weight) for name, weight in module.named_parameters()}


def output(config, weights, *inputs):
    module = config.build(inputs[0].shape[-1])
    module.load_state_dict(weights)
    with torch.no_grad():
        return module(*inputs)


def turn(rope, width):
    """Any orthogonal turn, or one that commutes with a rotation."""
    if rope is None:
        return torch.linalg.qr(torch.randn(width, width))[0]
    z = torch.polar(torch.ones(width // 2), 6.28 * torch.rand(width // 2))
    blocks = torch.cat(
        [
            torch.cat([z.real.diag(), -z.imag.diag()], 1),
            torch.cat([z.imag.diag(), z.real.diag()], 1),
        ]
    )
    if rope.layout == "half-split":
        return blocks
    order = torch.arange(width).unflatten(0, (2, -1)).T.flatten()
    return blocks[order][:, order]


def turned_copies(gqa, weights, n_kv_head):
    """The same function with each KV head as copies, every copy turned in its own way."""
    config = replace(gqa, n_kv_head=n_kv_head)
    copies = RepeatHeads().convert(weights, gqa, config, Statistics(), "").weights
    keys = torch.stack([turn(gqa.rope, gqa.head_dim) for _ in range(n_kv_head)])
    values = torch.stack([turn(None, gqa.v_head_dim) for _ in range(n_kv_head)])
    made = dict(copies)
    for name, turns in (
        ("k_proj", keys),
        ("v_proj", values),
        ("q_proj", keys.repeat_interleave(config.group, 0)),
    ):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in made:
                rows = made[f"{name}.{part}"].unflatten(0, (len(turns), -1))
                made[f"{name}.{part}"] = torch.einsum("hef,hf...->he...", turns, rows).flatten(0, 1)
    columns = made["o_proj.weight"].unflatten(1, (config.n_query_head, -1))
    turns = values.repeat_interleave(config.group, 0)
    made["o_proj.weight"] = torch.einsum("hef,dhf->dhe", turns, columns).flatten(1)
    return config, made


@ropes
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("before", [4, 12])
@pytest.mark.parametrize("calibrated", [False, True])
def test_turned_copies_of_a_head_are_one_head(rope, bias, before, calibrated):
    """Procrustes pooling recovers the GQA they were made of; the mean and the first head do not."""
    gqa = GroupedConfig(
        n_query_head=12, n_kv_head=2, head_dim=6, v_head_dim=5, rope=rope, qkv_bias=bias, o_bias=bias
    )
    x, y = torch.randn(3, 8, D), torch.randn(50, D + 1)
    weights = weights_of(gqa)
    config, planted = turned_copies(gqa, weights, before)
    expected = output(gqa, weights, x)
    torch.testing.assert_close(output(config, planted, x), expected)
    statistics = Statistics(inputs=y.mT @ y / 50 if calibrated else None)

    def check(method):
        done = PoolHeads().convert(planted, config, gqa, statistics, method)
        assert done.lost < 1e-20
        torch.testing.assert_close(output(gqa, done.weights, x), expected)

    check("procrustes")
    for mutant in ("mean", "first"):
        with pytest.raises(AssertionError):
            check(mutant)


@ropes
def test_planted_copies_in_a_model(rope, gpt, apart):
    """The certificate calls it exact, for nothing was lost."""
    gqa = replace(GQA, rope=rope, qkv_bias=True)
    model = gpt(gqa)
    mha, _ = rehead.convert(model, replace(gqa, n_kv_head=6))
    for index, layer in enumerate(mha.layers):
        source = dict(model.layers[index].self_attn.named_parameters())
        _, planted = turned_copies(gqa, {name: weight.detach() for name, weight in source.items()}, 6)
        layer.self_attn.load_state_dict(planted)
    assert apart(model, mha) < 1e-12
    result, certificate = rehead.convert(mha, to="gqa", n_kv_head=2)
    assert [layer.methods for layer in certificate.layers] == [["procrustes"]] * 2
    assert certificate.exact is True
    assert apart(model, result) < 1e-10
    for method in ("mean", "first"):
        result, certificate = rehead.convert(mha, to="gqa", n_kv_head=2, method=method)
        assert certificate.exact is False
        assert apart(model, result) > 1e-3


METHODS = list(PoolHeads.methods)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bias", [False, True])
def test_one_head_of_each_group_of_neighbours(method, bias):
    """Contiguous: heads 0-2 make the first. `first` and `mean` are as plain as they sound."""
    config, result = replace(MHA, qkv_bias=bias), replace(GQA, qkv_bias=bias)
    weights = weights_of(config)
    pooled = PoolHeads().convert(weights, config, result, Statistics(), method).weights
    for name in ("k_proj", "v_proj"):
        for part in ("weight", "bias") if bias else ("weight",):
            heads = weights[f"{name}.{part}"].unflatten(0, (2, 3, -1))
            found = pooled[f"{name}.{part}"].unflatten(0, (2, -1))
            assert found.shape == heads[:, 0].shape
            if method != "procrustes":
                expected = heads[:, 0] if method == "first" else heads.mean(1)
                torch.testing.assert_close(found, expected)
    untouched = [name for name in weights if name.startswith(("q_proj", "o_proj"))]
    same = [torch.equal(weights[name], pooled[name]) for name in untouched]
    assert all(same) == (method != "procrustes")


@pytest.mark.parametrize("method", METHODS)
def test_what_is_lost_is_the_energy_of_the_differences(method):
    """For `mean` and `first`, by arithmetic: with a moment, E|(W - W') [x; 1]|^2 over E|W [x; 1]|^2."""
    config, result = replace(MHA, qkv_bias=True), replace(GQA, qkv_bias=True)
    weights, x = weights_of(config), torch.cat([torch.randn(40, D), torch.ones(40, 1)], 1)
    statistics = Statistics(inputs=x.mT @ x / 40)
    done = PoolHeads().convert(weights, config, result, statistics, method)
    if method == "procrustes":
        assert 0 < done.lost < PoolHeads().convert(weights, config, result, statistics, "mean").lost
        return
    error = whole = 0.0
    for name in ("k_proj", "v_proj"):

        def made(some, n_copy, name=name):
            rows = x[:, :-1] @ some[f"{name}.weight"].mT + some[f"{name}.bias"]
            return rows.unflatten(1, (2, -1)).repeat_interleave(n_copy, 1) if n_copy > 1 else rows

        before = made(weights, 1).unflatten(1, (2, 3, -1))
        after = made(done.weights, 1).unflatten(1, (2, 1, -1))
        error += float((before - after).square().sum())
        whole += float(before.square().sum())
    assert done.lost == pytest.approx(error / whole, rel=1e-10)


@ropes
def test_nearly_turned_copies_are_nearly_one(rope):
    """With a little noise, aligned pooling is far nearer the source's output than the others."""
    gqa, distances = replace(GQA, rope=rope), dict.fromkeys(METHODS, 0.0)
    for seed in range(5):
        config, planted = turned_copies(gqa, weights_of(gqa, seed), 6)
        noisy = {name: weight + 0.02 * torch.randn_like(weight) for name, weight in planted.items()}
        x = torch.randn(2, 7, D)
        expected = output(config, noisy, x)
        for method in METHODS:
            pooled = PoolHeads().convert(noisy, config, gqa, Statistics(), method).weights
            distances[method] += float((output(gqa, pooled, x) - expected).square().sum())
    assert distances["procrustes"] < 0.5 * min(distances["mean"], distances["first"])


@pytest.mark.parametrize("score", [name for name in scores if name != "scaled_dot"])
@pytest.mark.parametrize("method", METHODS)
def test_a_learned_score_goes_along(score, method):
    """Its weights are per query head; keys are not turned under them. Copies are lost by no method."""
    mha = replace(MHA, score=scores[score]())
    gqa = replace(GQA, score=scores[score]())
    x, weights = torch.randn(3, 8, D), weights_of(gqa)
    copies = RepeatHeads().convert(weights, gqa, mha, Statistics(), "").weights
    torch.testing.assert_close(output(mha, copies, x), output(gqa, weights, x))
    done = PoolHeads().convert(copies, mha, gqa, Statistics(), method)
    assert done.lost < 1e-20
    torch.testing.assert_close(output(gqa, done.weights, x), output(gqa, weights, x))


def test_heads_of_a_latent_are_repeated_with_their_biases():
    config = LatentConfig(
        n_query_head=6, n_kv_head=2, kv_lora_rank=9, qk_nope_head_dim=4, v_head_dim=5, qkv_bias=True
    )
    more, x, weights = replace(config, n_kv_head=6), torch.randn(3, 8, D), weights_of(config)
    copies = RepeatHeads().convert(weights, config, more, Statistics(), "").weights
    torch.testing.assert_close(output(more, copies, x), output(config, weights, x))
    wrong = copies["kv_b_proj.weight"].unflatten(0, (6, -1))[[0, 1, 0, 1, 0, 1]].flatten(0, 1)
    with pytest.raises(AssertionError):  # another order of the copies
        torch.testing.assert_close(
            output(more, copies | {"kv_b_proj.weight": wrong}, x), output(config, weights, x)
        )


def test_cross_attention_is_pooled_and_repeated_too():
    """Keys and values are as wide as the context."""
    gqa = replace(GQA, d_context=C, causal=False, qkv_bias=True)
    weights, x, y = weights_of(gqa), torch.randn(3, 7, D), torch.randn(3, 10, C)
    config, planted = turned_copies(gqa, weights, 6)
    expected = output(gqa, weights, x, y)
    torch.testing.assert_close(output(config, planted, x, y), expected)
    done = PoolHeads().convert(planted, config, gqa, Statistics(), "procrustes")
    torch.testing.assert_close(output(gqa, done.weights, x, y), expected)


def test_heads_of_zeros_stay_finite():
    weights = {name: torch.zeros_like(weight) for name, weight in weights_of(MHA).items()}
    for method in METHODS:
        done = PoolHeads().convert(weights, MHA, GQA, Statistics(), method)
        assert done.lost == 0
        assert all(weight.isfinite().all() for weight in done.weights.values())


def test_tied_heads_are_not_pooled(gpt):
    tied = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=4, tie_kv=True)
    with pytest.raises(ConfigError, match="pool-heads: tie_kv=True makes keys and values one"):
        rehead.convert(gpt(tied), replace(tied, n_kv_head=1))
