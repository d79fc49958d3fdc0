"""MLA against DeepSeek's and the olympiad's formulas, every head alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rehead.attention import LatentAttention, LatentConfig, kernels
from rehead.attention.grouped_config import GroupedConfig
from rehead.attention.kernels import folded
from rehead.attention.mask import Mask
from rehead.attention.rope import RopeConfig

B, L, S, D, C, H, R, N, P, V = 3, 5, 8, 13, 11, 6, 9, 10, 4, 7
PLAIN = LatentConfig(n_query_head=H, kv_lora_rank=R, qk_nope_head_dim=N, v_head_dim=V, latent_norm=False)
DEEPSEEK = replace(PLAIN, latent_norm=True, qk_rope_head_dim=P, rope=RopeConfig(), q_lora_rank=12)


def turn(x, theta=10_000.0):
    """Rotary embedding of one head (B L E), half-split, as complex numbers."""
    half = x.shape[-1] // 2
    angle = np.multiply.outer(np.arange(x.shape[1]), theta ** (-np.arange(half) / half))
    x = x.detach()
    pairs = (x[..., :half].numpy() + 1j * x[..., half:].numpy()) * np.exp(1j * angle)
    return torch.from_numpy(np.concatenate([pairs.real, pairs.imag], -1))


def head_by_head(module, x, context=None, turn=turn):
    """Output and weights from single heads' keys W_UK,g c (++ the rotated part) and values W_UV,g c."""
    config, y = module.config, x if context is None else context
    state = {name: p.detach() for name, p in module.named_parameters()}
    R, N, P, V = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim

    def linear(name, source):
        return source @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def norm(name, source):
        if f"{name}.weight" not in state:
            return source
        return source / (source.square().mean(-1, keepdim=True) + 1e-6).sqrt() * state[f"{name}.weight"]

    latent = linear("kv_a_proj_with_mqa", y)
    shared, latent = turn(latent[..., R:]), norm("kv_a_layernorm", latent[..., :R])
    if config.q_lora_rank is None:
        queries = linear("q_proj", x)
    else:
        queries = linear("q_b_proj", norm("q_a_layernorm", linear("q_a_proj", x)))
    both, weights, total = linear("kv_b_proj", latent), [], state.get("o_proj.bias", torch.zeros(x.shape[-1]))
    for h in range(config.n_query_head):
        g = h // (config.n_query_head // config.n_kv_head)
        query, kv = queries[..., h * (N + P) :][..., : N + P], both[..., g * (N + V) :][..., : N + V]
        query, key = norm("q_norm", query), norm("k_norm", kv[..., :N])
        if config.rebuilds_keys:
            query, key = turn(query), turn(key)
        elif P:
            query = torch.cat([query[..., :N], turn(query[..., N:])], -1)
            key = torch.cat([key, shared], -1)
        scores = query @ key.mT / (N + P) ** 0.5
        if context is None:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        weights.append(scores.softmax(-1))
        total = total + weights[-1] @ kv[..., N:] @ state["o_proj.weight"][:, h * V : (h + 1) * V].T
    return total, torch.stack(weights, 1)


def fresh(config):
    """A module with no weight at its first value."""
    module = config.build(D)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


WAYS = {
    "deepseek": DEEPSEEK,
    "no query latent": replace(DEEPSEEK, q_lora_rank=None),
    "shared heads": replace(DEEPSEEK, n_kv_head=2),
    "rebuilt keys": replace(PLAIN, rope=True, latent_norm=True),
    "rebuilt keys, normed": replace(PLAIN, rope=True, n_kv_head=2, qk_norm_eps=1e-6),
    "no position, normed, biased": replace(PLAIN, qkv_bias=True, qk_norm_eps=1e-6),
    "no position, biased": replace(PLAIN, qkv_bias=True, o_bias=True),
    "cross": replace(PLAIN, d_context=C, causal=False),
}


@pytest.mark.parametrize("config", WAYS.values(), ids=WAYS)
def test_a9_a14_expanded(config):
    """A9, A14: keys and values rebuilt per head, then MHA; the rotary part is one for all heads."""
    x, context = torch.randn(B, L, D), torch.randn(B, S, C) if config.d_context else None

    def check(module, **options):
        out, weights = head_by_head(module, x, context, **options)
        torch.testing.assert_close(module(x, context), out)
        torch.testing.assert_close(module.weights(x, context), weights)

    def values_first(module):
        def swap(_, x, both):
            return both.unflatten(-1, (config.n_kv_head, N + V)).roll(V, -1).flatten(-2)

        module.kv_b_proj.register_forward_hook(swap)

    def other_scale(module):
        module.scale = R**-0.5

    def other_norm(module):
        module.kv_a_layernorm.eps = 1.0

    def norm_before_rebuilding(module):
        module.k_norm = None
        module.kv_a_layernorm.register_forward_hook(
            lambda *call: torch.nn.functional.rms_norm(call[-1], (R,))
        )

    def norm_after_rotation(module):
        q_norm, k_norm, rotary = module.q_norm, module.k_norm, module.rotary
        module.q_norm = module.k_norm = None
        norms = iter([q_norm, k_norm] * 2)
        module.rotary = lambda heads, *at: next(norms)(rotary(heads, *at))

    def norm_of_all_heads(module):
        weight, eps = module.k_norm.weight, module.k_norm.eps
        module.k_norm.forward = lambda keys: (
            torch.nn.functional.rms_norm(keys, keys.shape[2:], eps=eps) * weight
        )

    check(fresh(config))
    mutants = [values_first, other_scale, *[other_norm] * config.latent_norm]
    if config.qk_norm_eps:
        mutants += [
            norm_before_rebuilding,
            norm_of_all_heads,
            *[norm_after_rotation] * (config.rope is not None),
        ]
    for breaks in mutants:
        module = fresh(config)
        breaks(module)
        with pytest.raises(AssertionError):
            check(module)
    if config.rope:
        with pytest.raises(AssertionError):
            check(fresh(config), turn=lambda x: x)


@pytest.mark.parametrize("n_kv_head", [H, 2])
def test_a9_is_mha_with_the_products(n_kv_head):
    """A9: W_K = W_UK W_DKV and W_V = W_UV W_DKV in plain (or grouped) attention give the same output."""
    latent = fresh(replace(PLAIN, n_kv_head=n_kv_head))
    x = torch.randn(B, L, D)

    def check(latent, split=N):
        heads = GroupedConfig(n_query_head=H, n_kv_head=n_kv_head, head_dim=N, v_head_dim=V).build(D)
        up = latent.kv_b_proj.weight.unflatten(0, (n_kv_head, N + V))
        key_up, value_up = (up[:, :N], up[:, N:]) if split == N else (up[:, V:], up[:, :V])
        heads.load_state_dict({
            "q_proj.weight": latent.q_proj.weight,
            "k_proj.weight": key_up.flatten(0, 1) @ latent.kv_a_proj_with_mqa.weight,
            "v_proj.weight": value_up.flatten(0, 1) @ latent.kv_a_proj_with_mqa.weight,
            "o_proj.weight": latent.o_proj.weight,
        })  # fmt: skip
        torch.testing.assert_close(latent(x), heads(x), rtol=1e-12, atol=1e-12)

    check(latent)
    with pytest.raises(AssertionError):
        check(latent, split=V)  # values' rows first
    normed = fresh(replace(PLAIN, n_kv_head=n_kv_head, latent_norm=True))
    with pytest.raises(AssertionError):
        check(normed)


def reduced_weights(latent, factor):
    """A15: Q_h = factor W_UK,h^T W_Q,h, K = V = W_DKV, O_h = W_O,h W_UV,h."""
    up = latent.kv_b_proj.weight.unflatten(0, (H, N + V))
    query = latent.q_proj.weight.unflatten(0, (H, N))
    out = latent.o_proj.weight.unflatten(1, (H, V))
    return {
        "q_proj.weight": factor * torch.einsum("hnr,hnd->hrd", up[:, :N], query).flatten(0, 1),
        "k_proj.weight": latent.kv_a_proj_with_mqa.weight,
        "v_proj.weight": latent.kv_a_proj_with_mqa.weight,
        "o_proj.weight": torch.einsum("dhv,hvr->dhr", out, up[:, N:]).flatten(1, 2),
    }


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a15_reduced_form_is_mqa_over_the_latent(dtype, bound):
    """A15: with the weights multiplied out, MLA is MQA whose one KV head is the latent; B is not H."""
    latent, x = LatentAttention(PLAIN, D), torch.randn(B, L, D, dtype=dtype)
    for parameter in latent.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    latent = latent.to(dtype)
    mqa = GroupedConfig(n_query_head=H, n_kv_head=1, head_dim=R).build(D).to(dtype)

    def check(factor, change=lambda state: state):
        mqa.load_state_dict(change(reduced_weights(latent, factor)))
        vanilla = latent(x)
        error = (mqa(x) - vanilla).square().mean().sqrt() / vanilla.square().mean().sqrt()
        assert error < bound

    def other_head(state):
        return state | {"o_proj.weight": state["o_proj.weight"].roll(R, 1)}

    latent.q_proj.weight.data *= 1e4  # as sharp as trained attention, or a wrong scale would not show
    check((R / N) ** 0.5)
    for mutant in (((N / R) ** 0.5,), (1.0,), ((R / N) ** 0.5, other_head)):  # E9, E8
        with pytest.raises(AssertionError):
            check(*mutant)


def test_a15_e10_latent_broadcasts_over_heads(monkeypatch):
    """E10: the latent is one for all heads; the olympiad's reshape read the batch as heads (B = H)."""
    latent, x = fresh(PLAIN), torch.randn(H, L, D)

    def check(attend):
        query, rows, _, mask = latent._project(x, None, None, None, None)
        expected = latent.expanded(query, rows, mask)
        monkeypatch.setattr(kernels, "attend", attend)
        out = latent.absorbed(query, rows, mask)
        monkeypatch.undo()
        torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)

    def batch_as_heads(query, key, value, mask, **options):
        key, value = (t.squeeze(2).transpose(0, 1)[None].expand(H, -1, -1, -1) for t in (key, value))
        return kernels.reference(query, key, value, mask.dense(), scale=options["scale"])

    real = kernels.attend
    check(real)
    for mutant in (
        batch_as_heads,
        lambda *a, **o: real(*a, **o | {"scale": R**-0.5}),
        lambda q, k, v, m, **o: real(q.flip(2), k, v, m, **o),
    ):
        with pytest.raises(AssertionError):
            check(mutant)


@pytest.mark.parametrize("rank", [14, 9])
@pytest.mark.parametrize("n_kv_head", [H, 2])
def test_absorbed_below_is_where_flops_cross(rank, n_kv_head, monkeypatch):
    """Over a long past, fewer new queries than `absorbs_below` cost less absorbed, more cost less expanded."""
    monkeypatch.setitem(folded.FEW_QUERIES, torch.float64, 10**6)  # SDPA hides its products from the counter
    config = replace(DEEPSEEK, kv_lora_rank=rank, n_kv_head=n_kv_head)
    module, past = config.build(D).to("meta"), 50_000

    def flops(method, n_query):
        query = torch.empty(1, n_query, H, N + P, device="meta")
        latent = torch.empty(1, past, rank + P, device="meta")
        with FlopCounterMode(display=False) as counter:
            method(query, latent, Mask(n_query=n_query, n_key=past, causal=False))
        return counter.get_total_flops()

    def check(crossing):
        below, above = int(0.95 * crossing), int(1.05 * crossing) + 1
        assert flops(module.absorbed, below) < flops(module.expanded, below)
        assert flops(module.absorbed, above) > flops(module.expanded, above)

    check(config.absorbs_below)
    for mutant in (config.absorbs_below * 1.3, config.absorbs_below / 1.3):
        with pytest.raises(AssertionError):
            check(mutant)


def test_a_small_latent_is_always_absorbed():
    assert replace(DEEPSEEK, kv_lora_rank=(N + V) // 2).absorbs_below == float("inf")


PATHS = [
    (R, 1, ["absorbed", "half_absorbed"]),
    (R, 16, ["absorbed", "half_absorbed"]),
    (120, 16, ["expanded"] * 2),
]


@pytest.mark.parametrize(("rank", "n_query", "path"), PATHS)
def test_path_taken_with_a_cache(rank, n_query, path, monkeypatch):
    """Decoding is absorbed, a long chunk expanded; of keys that must be rebuilt, only the values are absorbed."""
    taken = []
    for name in ("absorbed", "half_absorbed", "expanded"):
        real = getattr(LatentAttention, name)
        monkeypatch.setattr(LatentAttention, name, lambda *a, _n=name, _r=real: taken.append(_n) or _r(*a))
    for config in (replace(DEEPSEEK, kv_lora_rank=rank), replace(PLAIN, kv_lora_rank=rank, rope=True)):
        module = config.build(D)
        module(torch.randn(B, n_query, D), cache=config.cache(B, dtype=torch.float64))
        module(torch.randn(B, n_query, D))
    assert taken == [path[0], "expanded", path[1], "expanded"]


def test_b17_the_rotary_part_is_as_wide_as_given():
    """E22's cousin: angles are those of qk_rope_head_dim, or of the whole key when it is rotated whole."""
    assert DEEPSEEK.build(D).rotary.width == P
    assert replace(PLAIN, rope=True).build(D).rotary.width == N
    assert PLAIN.build(D).rotary is None
    assert DEEPSEEK.rope == RopeConfig()


@pytest.mark.parametrize("config", [PLAIN, DEEPSEEK], ids=["plain", "deepseek"])
def test_a17_only_the_latent_is_kept(config):
    """A17: r numbers per token, r + d_rope with RoPE, whatever the number of heads."""
    assert config.kv_numbers() == config.kv_lora_rank + config.qk_rope_head_dim
    assert replace(config, n_query_head=2 * H, n_kv_head=H).kv_numbers() == config.kv_numbers()


@pytest.mark.parametrize("rank", [3, 8, 300])
def test_long_prompts_with_rebuilt_keys_are_expanded(rank):
    """The half absorbed form holds the scores of all heads: with a rank below the width of values, of all tokens."""
    module = replace(PLAIN, kv_lora_rank=rank, rope=RopeConfig()).build(D)
    forms = [module.choice(n, 100).form for n in (1, 64, 5000)]
    assert forms == ["half absorbed", "expanded", "expanded"]
