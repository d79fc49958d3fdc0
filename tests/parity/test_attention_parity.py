"""The same numbers as Hugging Face's classes, from the same weights under the same names."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, scalings, visible

B, L, D, H, K, E, R, N, P, V, Q = 3, 11, 24, 6, 2, 10, 9, 14, 8, 12, 13
CAUSAL = torch.full((L, L), float("-inf")).triu(1)[None, None]
GQA = GroupedConfig(n_query_head=H, n_kv_head=K, head_dim=E, rope=RopeConfig())
MLA = LatentConfig(n_query_head=H, kv_lora_rank=R, qk_nope_head_dim=N, qk_rope_head_dim=P, v_head_dim=V)
MLA_Q = replace(MLA, q_lora_rank=Q)


def tables(width, theta=10_000.0):
    """Hugging Face's cosines and sines in float64; its own classes compute them in float32."""
    angle = torch.from_numpy(np.multiply.outer(np.arange(L), theta ** (-np.arange(0, width, 2) / width)))
    angle = torch.cat([angle, angle], -1)[None].expand(B, -1, -1)
    return angle.cos(), angle.sin()


def run(theirs, x, width, mask=CAUSAL, theta=10_000.0):
    out = theirs(x, position_embeddings=tables(width, theta), attention_mask=mask.to(x.dtype))
    return out[0].detach()


def theirs_like(kind, config):
    """Their module, float64 throughout, no weight at its first value."""
    config._attn_implementation = "sdpa"  # eager softmaxes in float32
    module = kind(config, 0).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for norm in module.children():
        if hasattr(norm, "variance_epsilon"):  # float32 whatever the input; the same formula in float64
            shape, eps = norm.weight.shape, norm.variance_epsilon
            norm.forward = partial(F.rms_norm, normalized_shape=shape, weight=norm.weight, eps=eps)
    return module


def ours_like(theirs, config):
    ours = config.build(D)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours


def check(config, theirs, width, **options):
    """The same outputs in one pass and from the cache, chunk by chunk."""
    x, ours = torch.randn(B, L, D), ours_like(theirs, config)
    expected = run(theirs, x, width, **options)
    torch.testing.assert_close(ours(x).detach(), expected, rtol=1e-11, atol=1e-12)
    cache = config.cache(B, dtype=x.dtype)
    chunks = [ours(x[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 8), (8, L))]
    torch.testing.assert_close(torch.cat(chunks, 1).detach(), expected, rtol=1e-10, atol=1e-11)


def check_fails(config, theirs, width, **options):
    with pytest.raises(AssertionError):
        check(config, theirs, width, **options)


def llama(theta=10_000.0, **more):
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    rope = {"rope_type": "default", "rope_theta": theta}
    config = LlamaConfig(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=K, head_dim=E, rope_parameters=rope, **more
    )
    return theirs_like(LlamaAttention, config)


def deepseek(q_lora_rank=None, interleave=False):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3Config

    config = DeepseekV3Config(
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=H,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=R,
        qk_nope_head_dim=N,
        qk_rope_head_dim=P,
        v_head_dim=V,
        rope_interleave=interleave,
    )
    return theirs_like(DeepseekV3Attention, config)


def test_llama():
    """A5, B15, B16: contiguous heads, half-split pairs."""
    theirs = llama()
    check(GQA, theirs, E)
    check(replace(GQA, rope=RopeConfig(theta=500.0)), theirs, E, theta=500.0)
    for mutant in (
        replace(GQA, head_map="modular"),
        replace(GQA, rope=RopeConfig(layout="interleaved")),
        replace(GQA, rope=RopeConfig(theta=500.0)),
        replace(GQA, rope=None),
        replace(GQA, window=L - 1),
    ):
        check_fails(mutant, theirs, E)


def test_llama_with_its_own_tables():
    """Against `LlamaRotaryEmbedding` itself, which is float32."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs, x, at = llama(theta=300.0), torch.randn(B, L, D), torch.arange(L)[None]
    embedding = LlamaRotaryEmbedding(theirs.config)(x, at)
    expected = theirs(x, position_embeddings=embedding, attention_mask=CAUSAL.to(x.dtype))[0].detach()
    ours = ours_like(theirs, replace(GQA, rope=RopeConfig(theta=300.0)))
    torch.testing.assert_close(ours(x).detach(), expected, rtol=1e-5, atol=1e-5)


def test_llama_biases():
    check(replace(GQA, qkv_bias=True, o_bias=True), llama(attention_bias=True), E)


def test_qwen2_biases():
    """Biases on queries, keys and values only."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Config

    config = Qwen2Config(hidden_size=D, num_attention_heads=H, num_key_value_heads=K)
    config.head_dim = E
    check(replace(GQA, qkv_bias=True), theirs_like(Qwen2Attention, config), E)


@pytest.mark.parametrize("window", [1, 3, L])
def test_window(window):
    """B11: a window of W is W visible keys, the query's own included, in their masks too."""
    from transformers.masking_utils import sliding_window_causal_mask_function

    sees = sliding_window_causal_mask_function(window)
    at = torch.arange(L)[None]
    seen = torch.stack([torch.stack([sees(0, 0, i, j) for j in at[0]]) for i in at[0]])
    assert torch.equal(visible(at, at, window)[0], seen)
    assert not torch.equal(visible(at, at, window - 1)[0], seen)
    theirs, mask = llama(), torch.zeros(L, L).masked_fill(~seen, float("-inf"))[None, None]
    check(replace(GQA, window=window), theirs, E, mask=mask)
    for wrong in {window - 1, window + 1} - {0, L + 1}:
        check_fails(replace(GQA, window=wrong), theirs, E, mask=mask)


@pytest.mark.parametrize("config", [MLA, MLA_Q], ids=["no query latent", "query latent"])
@pytest.mark.parametrize("interleave", [False, True])
def test_deepseek_v3(config, interleave):
    """A9, A15: expanded in one pass, absorbed from the cache; `rope_interleave` is our layout."""
    layout, other = ("half-split", "interleaved")[:: -1 if interleave else 1]
    theirs = deepseek(config.q_lora_rank, interleave)
    check(replace(config, rope=RopeConfig(layout=layout)), theirs, P)
    for mutant in (
        replace(config, rope=RopeConfig(layout=other)),
        replace(config, rope=RopeConfig(layout=layout, theta=500.0)),
        replace(config, window=L - 1),
    ):
        check_fails(mutant, theirs, P)


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "llama3, its own defaults": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn, its own ramp": {
        "factor": 16.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
    },
    "yarn, ramp past the last pair": {"factor": 4.0, "original_max_position_embeddings": 262_144},
    "yarn, given factor": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 0.8,
    },
    "yarn, narrow ramp": {
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("width", "theta"), [(32, 10_000.0), (128, 500_000.0)])
def test_rope_scalings(name, width, theta):
    """Frequencies and attention factor under the same `rope_type` and the same numbers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, sizes = name.split(",")[0], SCALINGS[name]
    config = LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=int(sizes.get("original_max_position_embeddings", 512) * sizes["factor"]),
        rope_parameters={"rope_type": kind, "rope_theta": theta, **sizes},
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")

    def check(sizes, **options):
        ours = RopeConfig(theta=theta, scaling=scalings[kind](**sizes), **options)
        np.testing.assert_allclose(ours.frequencies(width), frequencies.double(), rtol=2e-6)
        assert ours.scaling.magnitude == pytest.approx(magnitude, rel=1e-12)

    check(sizes)
    with pytest.raises(AssertionError):
        check(sizes | {"factor": sizes["factor"] * 1.01})
    if kind == "llama3":
        with pytest.raises(AssertionError):
            check(sizes | {"original_max_position_embeddings": 1024})


@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_longrope(magnitude):
    """One list of factors, which transformers wants twice."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    factors = [1.0, 1.5, 2.25, 0.5, 3.0, 1.125]
    said = {"short_factor": factors, "long_factor": factors, "attention_factor": magnitude}
    lengths = {"max_position_embeddings": 64, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        hidden_size=48,
        num_attention_heads=4,
        rope_parameters={"rope_type": "longrope", "rope_theta": 500.0, **said, **lengths},
        **lengths,
    )
    frequencies, theirs = ROPE_INIT_FUNCTIONS["longrope"](config, device="cpu")
    ours = scalings["longrope"](factors=tuple(factors), attention_factor=magnitude)
    found = RopeConfig(theta=500.0, scaling=ours).frequencies(12)
    np.testing.assert_allclose(found, frequencies.double(), rtol=2e-6)
    assert ours.magnitude == theirs == magnitude
    other = scalings["longrope"](factors=(*factors[:-1], 1.2))
    assert not np.allclose(RopeConfig(theta=500.0, scaling=other).frequencies(12), frequencies, rtol=1e-3)


def test_every_scaling_has_parity():
    assert {name.split(",")[0] for name in SCALINGS} | {"longrope"} == set(scalings)
