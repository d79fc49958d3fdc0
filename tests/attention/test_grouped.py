"""MHA, GQA and MQA against the seeds' formulas: every head alone, from its rows of the stacked weights."""

from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rehead.attention import kernels
from rehead.attention.grouped import GroupedAttention
from rehead.attention.grouped_config import GroupedConfig
from rehead.errors import ConfigError

B, L, S, D, C, H, K, E, V = 4, 5, 7, 13, 11, 6, 2, 10, 9  # G = H/K = 3
GQA = GroupedConfig(n_query_head=H, n_kv_head=K, head_dim=E, v_head_dim=V)
CROSS = replace(GQA, d_context=C, causal=False)
OLYMPIAD = GroupedConfig(n_query_head=12, n_kv_head=3, head_dim=4, head_map="modular")  # A5: H = 12, G = 3


def head_by_head(module, x, context=None, reads=None, turn=lambda x: x):
    """The sum over heads of W_O,h softmax(W_Q,h x (W_K,g y) / sqrt(E)) W_V,g y, and the softmaxes.

    Causal without a context.
    """
    config, y = module.config, x if context is None else context
    weight = {name: p.detach() for name, p in module.named_parameters()}
    E, V, group = config.head_dim, config.v_head_dim, config.n_query_head // config.n_kv_head

    def rows(name, source, head, width):
        here = slice(head * width, (head + 1) * width)
        bias = weight.get(f"{name}.bias")
        return source @ weight[f"{name}.weight"][here].T + (0 if bias is None else bias[here])

    all_weights, total = [], weight.get("o_proj.bias", torch.zeros(x.shape[-1])).expand_as(x)
    for h in range(config.n_query_head):
        g = h // group if reads is None else reads(h)
        query, key = turn(rows("q_proj", x, h, E)), turn(rows("k_proj", y, g, E))
        scores = query @ key.mT / E**0.5
        if context is None:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        all_weights.append(scores.softmax(-1))
        gathered = all_weights[-1] @ rows("v_proj", y, g, V)
        total = total + gathered @ weight["o_proj.weight"][:, h * V : (h + 1) * V].T
    return total, torch.stack(all_weights, 1)


def turn(x, theta=10_000.0):
    """Rotary embedding of one head (B L E), half-split, as complex numbers."""
    half = x.shape[-1] // 2
    angle = np.multiply.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half))
    pairs = (x[..., :half].numpy() + 1j * x[..., half:].numpy()) * np.exp(1j * angle)
    return torch.from_numpy(np.concatenate([pairs.real, pairs.imag], -1))


class Scrambled(GroupedAttention):
    """Hands the heads to `o_proj` in reverse."""

    def _from_slots(self, gathered):
        return super()._from_slots(gathered).flip(2)


def test_a1_shapes():
    """A1: W_Q (H D_qk, D_1), W_K (H D_qk, D_2), W_V (H D_v, D_2), W_O (D_1, H D_v), no bias."""

    def check(config):
        module = config.build(D)
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        assert shapes == {
            "q_proj.weight": (H * E, D),
            "k_proj.weight": (K * E, C),
            "v_proj.weight": (K * V, C),
            "o_proj.weight": (D, H * V),
        }
        assert module(torch.randn(B, L, D), torch.randn(B, S, C)).shape == (B, L, D)

    check(CROSS)
    for mutant in (
        replace(CROSS, v_head_dim=E),
        replace(CROSS, d_context=D),
        replace(CROSS, n_kv_head=H),
        replace(CROSS, qkv_bias=True),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


def check_by_head(module, context=None, **options):
    x = torch.randn(B, L, D)
    out, weights = head_by_head(module, x, context, **options)
    torch.testing.assert_close(module(x, context), out)
    torch.testing.assert_close(module.weights(x, context), weights)


@pytest.mark.parametrize(
    "config",
    [GQA, replace(GQA, n_kv_head=H), CROSS, replace(CROSS, n_kv_head=1)],
    ids=["gqa", "mha", "gqa, cross", "mqa, cross"],
)
def test_a1_a3_a4_heads_are_stacked_and_their_outputs_summed(config):
    """A1, A3, A4: the module's stacked products and one concatenation are the sum over single heads."""
    context = torch.randn(B, S, C) if config.d_context else None
    check_by_head(config.build(D), context)
    with pytest.raises(AssertionError):
        check_by_head(Scrambled(config, D), context)


def test_a4_is_sdpa(monkeypatch):
    """A4: without a loop and without a mask, torch's own kernel on the same heads."""
    module, x, context = CROSS.build(D), torch.randn(B, L, D), torch.randn(B, S, C)

    def check():
        heads = (
            F.linear(source, getattr(module, name).weight).view(B, length, -1, width).transpose(1, 2)
            for name, source, length, width in (
                ("q_proj", x, L, E), ("k_proj", context, S, E), ("v_proj", context, S, V)
            )
        )  # fmt: skip
        gathered = F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(module(x, context), F.linear(gathered, module.o_proj.weight))

    check()
    attend = kernels.attend
    for mutant in (
        lambda q, k, v, m, **o: attend(q, k, v, m, **o | {"scale": 1.0}),
        lambda q, k, v, m, **o: attend(q, k, v, replace(m, causal=True, window=1), **o),
        lambda q, k, v, m, **o: attend(q, k.roll(1, 1), v, m, **o),  # keys of other values
    ):
        monkeypatch.setattr(kernels, "attend", mutant)
        with pytest.raises(AssertionError):
            check()


def readers(config):
    """KV head to the query heads whose output follows it, found by shaking the KV heads' values."""
    module, x, seen = config.build(D), torch.randn(1, L, D), []
    module.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (12, -1))))
    module(x)
    for g in range(config.n_kv_head):
        rows = slice(g * config.v_head_dim, (g + 1) * config.v_head_dim)
        module.v_proj.weight.data[rows] += 1
        module(x)
    moved = [(after - before).abs().amax((0, 1, 3)) > 0 for before, after in pairwise(seen)]
    return {g: row.nonzero().flatten().tolist() for g, row in enumerate(moved)}


def test_a5_modular_head_map():
    """A5: H = 12, G = 3: head h reads KV head h mod G."""

    def check(config):
        assert readers(config) == {0: [0, 3, 6, 9], 1: [1, 4, 7, 10], 2: [2, 5, 8, 11]}

    check(OLYMPIAD)
    for mutant in (replace(OLYMPIAD, head_map="contiguous"), replace(OLYMPIAD, n_kv_head=4)):
        with pytest.raises(AssertionError):
            check(mutant)
    contiguous = readers(replace(OLYMPIAD, head_map="contiguous"))
    assert contiguous == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}


def test_a5_keys_follow_the_same_map():
    """A5: the loop over heads with h mod G; the weights come in the order of the query heads too."""
    config = replace(OLYMPIAD, rope=True, qkv_bias=True)
    check_by_head(config.build(D), reads=lambda h: h % 3, turn=turn)
    with pytest.raises(AssertionError):
        check_by_head(config.build(D), turn=turn)


def test_a5_e2_modular_is_contiguous_permuted():
    """A5, E2: contiguous slot (g, k) holds modular head k G + g: rows of W_Q, columns of W_O."""
    x, modular = torch.randn(B, L, D), OLYMPIAD.build(D)
    contiguous = replace(OLYMPIAD, head_map="contiguous").build(D)

    def check(order):
        heads = [h * 4 + i for h in order for i in range(4)]
        contiguous.load_state_dict(modular.state_dict())
        contiguous.q_proj.weight.data = modular.q_proj.weight.data[heads]
        contiguous.o_proj.weight.data = modular.o_proj.weight.data[:, heads]
        torch.testing.assert_close(contiguous(x), modular(x), rtol=1e-13, atol=1e-14)

    check([0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11])
    for mutant in (range(12), [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]):
        with pytest.raises(AssertionError):
            check(mutant)


@pytest.mark.parametrize("rank", [E * K, 3])
def test_a6_rank_of_stacked_copies(rank):
    """A6: the keys H query heads read span no more than the K heads' own: rank(W) <= min(K d, D)."""
    wide = 29
    module = GQA.build(wide)
    module.k_proj.weight.data = torch.randn(K * E, rank) @ torch.randn(rank, wide)

    def check(heads):
        stacked = heads(module.k_proj.weight.unflatten(0, (K, E))).flatten(0, 1)
        assert stacked.shape == (H * E, wide)
        assert torch.linalg.matrix_rank(stacked) == torch.linalg.matrix_rank(module.k_proj.weight) == rank

    check(lambda weight: weight.repeat_interleave(H // K, 0))
    check(lambda weight: weight.repeat(H // K, 1, 1))
    with pytest.raises(AssertionError):  # heads of their own
        check(lambda weight: replace(GQA, n_kv_head=H).build(wide).k_proj.weight.unflatten(0, (H, E)))


COPIES = {
    "contiguous": lambda heads: heads.repeat_interleave(H // K, 0),
    "modular": lambda heads: heads.tile(H // K, 1, 1),
}


@pytest.mark.parametrize("head_map", COPIES)
def test_a7_gqa_is_tiled_mha(head_map):
    """A7: GQA = MHA whose K and V weights are copied per query head, but holds G heads of both."""
    config, x = replace(GQA, head_map=head_map), torch.randn(B, L, D)
    gqa = config.build(D)

    def check(copies):
        mha = replace(config, n_kv_head=H).build(D)
        state = gqa.state_dict()
        for name, width in (("k_proj.weight", E), ("v_proj.weight", V)):
            state[name] = copies(state[name].unflatten(0, (K, width))).flatten(0, 1)
        mha.load_state_dict(state)
        torch.testing.assert_close(mha(x), gqa(x), rtol=1e-13, atol=1e-14)

    other = "modular" if head_map == "contiguous" else "contiguous"
    check(COPIES[head_map])
    with pytest.raises(AssertionError):
        check(COPIES[other])
    assert config.cache_rows() == {"key": (K, E), "value": (K, V)}


def test_a7_parameters():
    """A7: K and V weights are 2 G d D_2 numbers."""

    def check(config):
        module = config.build(D)
        assert module.k_proj.weight.numel() + module.v_proj.weight.numel() == 2 * 3 * 4 * D
        all_four = 2 * 3 * 4 * D + 2 * 12 * 4 * D
        assert config.n_parameters(D) == sum(p.numel() for p in module.parameters()) == all_four

    check(OLYMPIAD)
    for change in ({"n_kv_head": 12}, {"n_kv_head": 1}, {"o_bias": True}):
        with pytest.raises(AssertionError):
            check(replace(OLYMPIAD, **change))


@pytest.mark.parametrize(("n_kv_head", "name"), [(6, "mha"), (2, "gqa"), (1, "mqa")])
def test_a8_one_flag_switches(n_kv_head, name):
    assert replace(GQA, n_kv_head=n_kv_head).name == name
    assert GroupedConfig(n_query_head=6, head_dim=E) == GroupedConfig(n_query_head=6, head_dim=E, n_kv_head=6)
    assert replace(replace(GQA, n_kv_head=n_kv_head)) == replace(GQA, n_kv_head=n_kv_head)


def test_a8_head_maps_coincide_at_both_ends():
    """A8: at G = H and G = 1 the same weights give the same output under both maps, to the last bit."""
    x = torch.randn(B, L, D)

    def check(n_kv_head):
        modules = [replace(GQA, n_kv_head=n_kv_head, head_map=m).build(D) for m in ("contiguous", "modular")]
        modules[1].load_state_dict(modules[0].state_dict())
        assert torch.equal(modules[0](x), modules[1](x))

    check(H)
    check(1)
    for between in (2, 3):
        with pytest.raises(AssertionError):
            check(between)


@pytest.mark.parametrize("rope", [False, True])
def test_b16_grouped_attention(rope):
    """B16: each A^(i,j) V^(i) concatenated, H d_k wide, then W_O; not their sum over j (E19)."""
    config = replace(GQA, v_head_dim=E, rope=rope)
    check_by_head(config.build(D), turn=turn if rope else lambda x: x)
    assert config.build(D).o_proj.weight.shape == (D, H * E)

    class SumForm(GroupedAttention):
        """E19: S^(i) = sum over j of Q^(i,j) K^(i)T: the queries of a group summed before the softmax."""

        def to_slots(self, query):
            summed = query.unflatten(2, (K, -1)).sum(3, keepdim=True)
            return summed.expand(-1, -1, -1, H // K, -1).flatten(2, 3)

    for mutant in (SumForm(config, D), replace(config, head_map="modular").build(D), Scrambled(config, D)):
        with pytest.raises(AssertionError):
            check_by_head(mutant, turn=turn if rope else lambda x: x)
    with pytest.raises(AssertionError):
        check_by_head(config.build(D), turn=(lambda x: x) if rope else turn)


def test_b16_biases():
    """Every bias has its place."""
    config = replace(GQA, qkv_bias=True, o_bias=True)
    check_by_head(config.build(D))
    for name in ("q_proj", "v_proj", "o_proj"):
        module = config.build(D)
        getattr(module, name).register_forward_hook(lambda layer, _, out: out - layer.bias)
        with pytest.raises(AssertionError):
            check_by_head(module)


def test_b17_flags_are_used_verbatim():
    """B17: n_query_head=6, n_kv_head=3, rope=True, attn_pdrop=0.1; another name is refused."""

    def check(make):
        config = make(n_query_head=6, n_kv_head=3, head_dim=32, rope=True, attn_pdrop=0.1)
        assert (config.n_query_head, config.n_kv_head, config.group) == (6, 3, 2)
        assert (config.rope.theta, config.rope.layout, config.attn_pdrop) == (10_000, "half-split", 0.1)
        for misspelt in ("n_kv_heads", "n_groups", "rop"):
            with pytest.raises(TypeError, match=misspelt):
                make(n_query_head=6, head_dim=32, **{misspelt: 3})

    def swallows(**flags):
        known = {field.name for field in fields(GroupedConfig)}
        return GroupedConfig(**{name: value for name, value in flags.items() if name in known})

    check(GroupedConfig)
    with pytest.raises(pytest.fail.Exception):
        check(swallows)


@pytest.mark.parametrize("score", ["scaled_dot", "concatenated"])
def test_b21_dropout_in_training_only(score):
    """B21: attn_pdrop changes a training pass, never an evaluation, and 0 changes nothing."""
    x = torch.randn(B, L, D)

    def check(module):
        module.eval()
        assert torch.equal(module(x), module(x))
        module.train()
        assert not torch.allclose(module(x), module(x))

    class Always(GroupedAttention):
        _pdrop = 0.1

    config = replace(GQA, attn_pdrop=0.1, score=score)
    check(config.build(D))
    for mutant in (Always(config, D), replace(config, attn_pdrop=0.0).build(D)):
        with pytest.raises(AssertionError):
            check(mutant)
    module = config.build(D).eval()
    plain = replace(config, attn_pdrop=0.0).build(D)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))


def test_b25_head_division():
    """B25: the message has both values and the valid divisors."""

    def check(refuse):
        with pytest.raises(ConfigError) as caught:
            refuse()
        for part in ("n_kv_head=4", "n_query_head=6", "[1, 2, 3, 6]"):
            assert part in str(caught.value)

    def vague():
        raise ConfigError("n_query_head must be divisible by n_kv_head")

    check(lambda: replace(GQA, n_kv_head=4))
    with pytest.raises(AssertionError):
        check(vague)
