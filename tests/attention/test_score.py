"""Homework 2.1: each score against its formula, one query and one key at a time, and what it cannot do."""

import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from rehead.attention import LatentConfig, kernels
from rehead.attention.grouped_config import GroupedConfig
from rehead.attention.program import Call, Embed, Program
from rehead.attention.score import Additive, Concatenated, Multiplicative, ScaledDot, SoftCapped, scores
from rehead.checkpoint.huggingface.base import families
from rehead.conversion.search import path
from rehead.errors import ConfigError
from rehead.measure.forecast import forward_bytes
from small import llama_shaped

B, L, S, K, G, E, U, D = 3, 4, 7, 2, 5, 6, 9, 13
LEARNED = {"multiplicative": Multiplicative(), "concatenated": Concatenated(), "additive": Additive(width=U)}


def sample():
    return torch.randn(B, L, K, G, E), torch.randn(B, S, K, E)


def fresh(config):
    """A score with no weight at its first value."""
    score = config.build(K, G, E)
    for parameter in score.parameters():
        torch.nn.init.normal_(parameter)
    return score


def pairwise(formula, query, key):
    """formula(k, g, key, query) for every head and pair: what a score must return, B K G L S."""
    values = [
        formula(k, g, key[b, s, k], query[b, i, k, g])
        for b in range(B) for k in range(K) for g in range(G) for i in range(L) for s in range(S)
    ]  # fmt: skip
    return torch.stack(values).reshape(B, K, G, L, S)


def test_roster():
    assert list(scores) == ["scaled_dot", "soft_capped", "multiplicative", "concatenated", "additive"]
    with pytest.raises(ConfigError, match=r"unknown score 'aditive'\. Did you mean 'additive'\?"):
        scores["aditive"]


@pytest.mark.parametrize("config", [*LEARNED.values(), Additive(width=U, bias=False)], ids=str)
def test_parameters_are_counted(config):
    built = config.build(K, G, E)
    assert sum(p.numel() for p in built.parameters()) == config.n_parameters(K * G, E)
    assert ScaledDot().build(K, G, E) is None
    assert ScaledDot().n_parameters(K * G, E) == 0


def test_a2_b5_scaled_dot_product():
    """A2, B5: rows sum to 1; dot products of N(0,1) vectors vary by d_k, so scores / sqrt(d_k) by 1."""
    query, key = torch.randn(200, 1, 1, 40), torch.randn(200, 50, 1, 40)

    def check(weights):
        torch.testing.assert_close(weights.sum(-1), torch.ones(200, 1, 1, 1))
        spread = weights.log().var(dim=-1).mean().item()  # what the row's own constant leaves
        assert spread == pytest.approx(1.0, rel=0.05)

    dots = torch.einsum("be,bse->bs", query[:, 0, 0], key[:, :, 0])
    assert dots.var().item() == pytest.approx(40, rel=0.05)
    check(kernels.weights(query, key))
    for wrong in (1.0, 1 / 40):  # no scale, d_k for its root
        with pytest.raises(AssertionError):
            check(kernels.weights(query, key, scale=wrong))
    with pytest.raises(AssertionError):
        check(kernels.weights(query, key) * 50)  # not normalised


def test_b5_is_sdpa():
    """B5: k.q / sqrt(d_k) as torch computes it; the identity as values shows the weights."""
    query, key = torch.randn(B, L, K, E), torch.randn(B, S, K, E)

    def check(**options):
        eye = torch.eye(S).expand(B, K, S, S)
        expected = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), eye)
        torch.testing.assert_close(kernels.weights(query, key, **options)[:, :, 0], expected)

    check()
    for wrong in (1.0, 1 / E, S**-0.5):
        with pytest.raises(AssertionError):
            check(scale=wrong)


def test_b6_multiplicative():
    """B6: k^T W q / sqrt(d_k), one W per query head."""
    query, key = sample()
    score = fresh(Multiplicative())

    def check(weight):
        expected = pairwise(lambda k, g, key, query: key @ weight[k, g] @ query / math.sqrt(E), query, key)
        torch.testing.assert_close(score(query, key), expected)

    check(score.weight)
    for mutant in (score.weight.mT, score.weight * math.sqrt(E), score.weight.flip(1)):
        with pytest.raises(AssertionError):
            check(mutant)


def test_b6_folds_into_the_query_projection():
    """B6: no wider class than the dot product for free queries, W_q' = W W_q; a wider one for rotated ones."""
    x, positions = torch.randn(B, L, D), torch.arange(L)[None]
    config = GroupedConfig(n_query_head=K * G, n_kv_head=K, head_dim=E, score=Multiplicative())
    attention = config.build(D)
    torch.nn.init.normal_(attention.score.weight)

    def folded(weight):
        plain = GroupedConfig(n_query_head=K * G, n_kv_head=K, head_dim=E).build(D)
        plain.load_state_dict(attention.state_dict(), strict=False)
        per_head = attention.q_proj.weight.unflatten(0, (K, G, E))
        plain.q_proj.weight.data = (weight @ per_head).flatten(0, 2)
        return plain

    def check(weight):
        torch.testing.assert_close(folded(weight)(x), attention(x), rtol=1e-12, atol=1e-13)

    check(attention.score.weight.data)
    with pytest.raises(AssertionError):
        check(attention.score.weight.data.mT)

    def moved(score):
        rotated = GroupedConfig(n_query_head=K * G, n_kv_head=K, head_dim=E, score=score, rope=True).build(D)
        for parameter in rotated.parameters():
            torch.nn.init.normal_(parameter)
        here, there = (rotated.weights(x, positions=at) for at in (positions, positions + 50))
        return (here - there).abs().max()

    assert moved(ScaledDot()) < 1e-10
    assert moved(Multiplicative()) > 1e-2


def test_b7_concatenated():
    """B7: w.[k; q], the key's half of w first."""
    query, key = sample()
    score = fresh(Concatenated())

    def check(w):
        expected = pairwise(lambda k, g, key, query: w[k, g] @ torch.cat([key, query]), query, key)
        torch.testing.assert_close(score(query, key), expected)

    check(score.weight)
    for mutant in (score.weight.roll(E, -1), score.weight.flip(1), score.weight / math.sqrt(E)):
        with pytest.raises(AssertionError):
            check(mutant)


def test_b7_ignores_the_query():
    """B7: the query's part cancels in the softmax, so all rows of the weights are one."""
    x = torch.randn(B, L, D)

    def check(score):
        config = GroupedConfig(n_query_head=K * G, n_kv_head=K, head_dim=E, score=score, causal=False)
        weights = config.build(D).weights(x)
        assert (weights - weights[:, :, :1]).abs().max() < 1e-15

    check(Concatenated())
    for other in (ScaledDot(), Multiplicative(), Additive()):
        with pytest.raises(AssertionError):
            check(other)


@pytest.mark.parametrize("bias", [True, False])
def test_b8_additive(bias):
    """B8: w.tanh(W [k; q] + b), W of `width` rows and 2 d_k columns, the key's first."""
    query, key = sample()
    score = fresh(Additive(width=U, bias=bias))
    b = score.bias if bias else torch.zeros(K, G, U)

    def check(inner, outer, b, activation=torch.tanh):
        def formula(k, g, key, query):
            return outer[k, g] @ activation(inner[k, g] @ torch.cat([key, query]) + b[k, g])

        torch.testing.assert_close(score(query, key), pairwise(formula, query, key))

    assert score.inner.shape == (K, G, U, 2 * E)
    check(score.inner, score.outer, b)
    for mutant in (
        (score.inner.roll(E, -1), score.outer, b),  # the query's columns first
        (score.inner, score.outer, b + 1.0),
        (score.inner, score.outer.flip(-1), b),
        (score.inner, score.outer, b, torch.sigmoid),
    ):
        with pytest.raises(AssertionError):
            check(*mutant)


@pytest.mark.parametrize(("target", "bound"), [("cosine", 0.002), ("angle", 0.04)])
def test_b8_e20_fits_the_angle_only_with_a_bias(target, bound):
    """B8, E20: 512 random units and a least-squares `outer` fit cos(theta) and theta; without a bias none does."""
    units = 512

    def pairs(n):
        at = torch.rand(n) * 2 * math.pi
        at = torch.cat([at, at + math.pi])  # with every vector its opposite: theta is even in [k; q]
        vectors = torch.stack([at.cos(), at.sin()], -1)
        cosine = (vectors @ vectors.T).clamp(-1, 1)
        return vectors, cosine if target == "cosine" else cosine.acos()

    def rms_error(bias):
        score = Additive(width=1, bias=bias).build(1, units, 2)  # a unit a head shows what each unit says
        torch.nn.init.normal_(score.inner, std=2.0)
        torch.nn.init.ones_(score.outer)
        if bias:
            torch.nn.init.normal_(score.bias, std=2.0)

        def features(vectors):
            query = vectors[None, :, None, None].expand(1, -1, 1, units, 2)
            return score(query, vectors[None, :, None]).detach()[0, 0].flatten(1).T  # pairs, units

        vectors, wanted = pairs(32)
        solve = torch.linalg.lstsq(features(vectors), wanted.reshape(-1, 1), driver="gelsd", rcond=1e-6)
        vectors, wanted = pairs(20)
        return (features(vectors) @ solve.solution - wanted.reshape(-1, 1)).square().mean().sqrt().item()

    def check(bias):
        assert rms_error(bias) < bound

    check(bias=True)
    with pytest.raises(AssertionError):
        check(bias=False)
    assert rms_error(bias=False) > (0.69 if target == "cosine" else 1.7)  # no better than 0


@pytest.mark.parametrize("score", ["additive", "concatenated"])
def test_a_model_without_weights_is_built_at_once(score):
    """Normal numbers on the meta device import sympy, for over a second."""
    code = (
        "import sys; from rehead.config import flags; from rehead.model import skeleton; "
        f"skeleton(flags.read(['model.score={score}']).model.resolve(11, 16)); "
        "assert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_score_of_the_users_own_may_have_any_numbers():
    """And its scaled products, if it is derived from those, are not taken for plain ones."""

    @dataclass(frozen=True, kw_only=True)
    class Shifted(ScaledDot):
        shift: float = 0.0

        def build(self, n_kv_head, group, head_dim):
            return Additive().build(n_kv_head, group, head_dim)

    assert Shifted(shift=-1.0).shift == -1
    with pytest.raises(ConfigError, match=r"score_scale=-1\.0: expected a positive number\. Leave it out"):
        Shifted(scale=-1.0)
    heads = GroupedConfig(n_query_head=2, head_dim=4, score=Shifted(), rope=True)
    with pytest.raises(
        ConfigError, match=r"MLA has plain scaled dot products for scores, and this attention has learned"
    ):
        path(
            heads,
            LatentConfig(n_query_head=2, kv_lora_rank=5, qk_nope_head_dim=4, v_head_dim=4, rope=True),
            8,
        )
    model = llama_shaped(heads, vocab_size=11, block_size=8, n_embd=8, n_hidden=9)
    for family in ("llama", "granite", "gemma2", "gemma3_text"):
        with pytest.raises(ConfigError, match=r"\bscore\b"):
            families[family].write(model)
    plain = llama_shaped(replace(heads, score=ScaledDot()), vocab_size=11, block_size=8, n_embd=8, n_hidden=9)
    assert forward_bytes(model, 1, 8, torch.float32) > forward_bytes(plain, 1, 8, torch.float32)


@pytest.mark.parametrize("kind", [SoftCapped, type("Own", (SoftCapped,), {})])
def test_only_the_soft_cap_itself_is_decoded_as_one(kind):
    """One token of a score derived from it is a call of `forward`, which computes what it builds."""
    program, layer = Program(), GroupedConfig(n_query_head=2, head_dim=4, score=kind()).build(8)
    layer.lower(program, program.add(Embed(torch.nn.Embedding(5, 8), None, 1.0)), 0)
    assert any(isinstance(op, Call) for op in program.ops) == (kind is not SoftCapped)
    assert layer.one_token().startswith("slow") == (kind is not SoftCapped)
