"""Formats of a KV cache against NumPy, the package gguf, a forward pass written out, and transformers."""

import json
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import rehead
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.cli import main
from rehead.cli.app import KVFormat
from rehead.conversion.plan import plan
from rehead.errors import ConfigError
from rehead.measure import cache_bytes, evaluate_text, kv_bytes_per_token
from rehead.measure.kv_dtype import RoundedCache, kv_dtypes
from rehead.model import build
from small import llama_shaped

D, B, L = 24, 2, 21
HEADS = {"n_query_head": 4, "head_dim": 32}
GROUPED = {
    "mha": GroupedConfig(n_kv_head=4, **HEADS),
    "gqa, rope": GroupedConfig(n_kv_head=2, rope=RopeConfig(), **HEADS),
    "mqa, rope, window": GroupedConfig(n_kv_head=1, rope=RopeConfig(), window=5, **HEADS),
}
SIZES = {"n_query_head": 4, "kv_lora_rank": 128, "qk_nope_head_dim": 8, "v_head_dim": 6}
LATENT = {
    "mla": LatentConfig(**SIZES),
    "mla, rope": LatentConfig(qk_rope_head_dim=32, rope=RopeConfig(), **SIZES),
    "mla, rope, window": LatentConfig(qk_rope_head_dim=32, rope=RopeConfig(), window=5, **SIZES),
}
LAYERS = GROUPED | LATENT
ROWS = ["fp32", "bf16", "fp16", "fp8", "int8", "q8_0"]


def e4m3():
    """All finite numbers of float8_e4m3fn: 4 bits of exponent biased by 7, 3 of mantissa; 15 and 7 is NaN."""
    codes = ((exponent, mantissa) for exponent in range(16) for mantissa in range(8))
    sizes = [
        mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent, mantissa in codes
        if (exponent, mantissa) != (15, 7)
    ]
    return np.array(sizes)


def in_e4m3(x):
    """The nearest, of two the one with the even last bit; 448 for more."""
    table, size = e4m3(), np.abs(x)[..., None]
    off = np.abs(table - size)
    first = off.argmin(-1)
    after = np.minimum(first + 1, len(table) - 1)
    tied = np.take_along_axis(off, after[..., None], -1)[..., 0] == off.min(-1)
    best = np.where(tied & (first % 2 == 1), after, first)
    return (np.sign(x) * table[best]).astype(x.dtype)


def in_bf16(x):
    bits = x.astype(np.float32).view(np.uint32)
    return (
        ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(float)
    )


def in_int8(x):
    scale = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float32).astype(x.dtype)
    return np.rint(x / scale) * scale


def in_q8_0(x):
    kind = gguf.GGMLQuantizationType.Q8_0
    flat = np.ascontiguousarray(x.reshape(-1, x.shape[-1]), dtype=np.float32)
    return gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind).reshape(x.shape).astype(float)


ORACLES = {
    "fp32": lambda x: x.astype(np.float32).astype(float),
    "bf16": in_bf16,
    "fp16": lambda x: x.astype(np.float32).astype(np.float16).astype(float),
    "fp8": in_e4m3,
    "int8": in_int8,
    "q8_0": in_q8_0,
}
CASES = [(name, kind) for name in LAYERS for kind in ROWS]


def oracle(kind):
    return lambda rows: torch.from_numpy(ORACLES[kind](rows.detach().numpy()))


def test_every_format_is_offered_and_tested():
    assert list(kv_dtypes) == list(get_args(KVFormat)) == list(ORACLES)


@pytest.mark.parametrize("kind", ORACLES)
def test_numbers_are_rounded_as_others_do(kind):
    sizes = torch.exp(torch.linspace(-12, 7, 64))[:, None]
    rows = torch.randn(64, 160) * sizes
    rows[0, :4] = torch.tensor([0.0, 17.0, 19.0, 448.0])  # 17 and 19 lie between two numbers of fp8
    rows = rows.float().double()
    found = kv_dtypes[kind]().rounded("latent", rows)
    assert torch.equal(found, oracle(kind)(rows))
    assert kind == "fp32" or not torch.equal(found, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ORACLES)
def test_scales_of_a_16_bit_model_are_no_coarser(kind, dtype):
    """They are in float32; only what is read back is rounded to the model's dtype."""
    rows = (torch.randn(64, 160) * torch.exp(torch.linspace(-4, 4, 64))[:, None]).to(dtype)
    found = kv_dtypes[kind]().rounded("latent", rows)
    assert torch.equal(found, oracle(kind)(rows.float()).to(dtype))


@pytest.mark.parametrize("kind", ORACLES)
def test_zeros_stay_zeros(kind):
    rows = torch.zeros(3, 160)
    assert torch.equal(kv_dtypes[kind]().rounded("latent", rows), rows)


@pytest.mark.parametrize(("row", "width", "part"), [
    ("key", 64, 64), ("key", 128, 128), ("key", 192, 64), ("value", 64, 64), ("value", 256, 64),
    ("key", 96, None), ("value", 32, None), ("latent", 576, None),
])  # fmt: skip
def test_q8_0_rotates_the_heads_that_llama_cpp_rotates(row, width, part):
    """By the Hadamard matrix of the largest power of two that divides a key's width, and of 64 for values."""
    rows = torch.randn(4, 3, width)
    rows[..., 5] *= 100  # what the rotation is for
    found = kv_dtypes["q8_0"]().rounded(row, rows)
    if part is None:
        assert torch.equal(found, oracle("q8_0")(rows))
        return
    bits = np.arange(part)[:, None] & np.arange(part)
    matrix = np.array([[(-1) ** int(n).bit_count() for n in line] for line in bits]) / part**0.5
    there = rows.numpy().reshape(4, 3, -1, part) @ matrix
    back = (in_q8_0(there) @ matrix).reshape(4, 3, width)
    assert np.abs(found.numpy() - back).max() < 1e-12 * np.abs(back).max()
    for wide in (torch.float32, torch.bfloat16):
        error = kv_dtypes["q8_0"]().rounded(row, rows.to(wide)).double() - rows.to(wide).double()
        assert error.square().mean() < 0.2 * (oracle("q8_0")(rows) - rows).square().mean()


def turned(x):
    """RoPE over (B, L, H, E): pairs (i, i + E/2), angle position * 10000 ** (-2i / E)."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attended(query, key, value, window, scale):
    """(B, L, H, ...) each, of equally many heads."""
    score = torch.einsum("blhe,bshe->bhls", query, key) * scale
    off = torch.arange(L)[:, None] - torch.arange(L)
    seen = (off >= 0) & (off < (window or L))
    return torch.einsum("bhls,bshv->blhv", score.masked_fill(~seen, -torch.inf).softmax(-1), value).flatten(2)


def grouped(layer, x, rounding):
    config = layer.config
    query, key, value = (
        (x @ projection.weight.T).unflatten(2, (-1, 32))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    if config.rope is not None:
        query, key = turned(query), turned(key)
    share = 4 // config.n_kv_head
    key, value = (rounding(rows).repeat_interleave(share, 2) for rows in (key, value))
    return attended(query, key, value, config.window, 32**-0.5) @ layer.o_proj.weight.T


def latent(layer, x, rounding):
    config, rope = layer.config, layer.config.qk_rope_head_dim
    row = x @ layer.kv_a_proj_with_mqa.weight.T
    down = row[..., :128]
    down = down * (down.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.kv_a_layernorm.weight
    query = (x @ layer.q_proj.weight.T).unflatten(2, (4, -1))
    if rope:
        down = torch.cat([down, turned(row[..., None, 128:])[:, :, 0]], -1)
        query = torch.cat([query[..., :8], turned(query[..., 8:])], -1)
    kept = rounding(down)
    up = (kept[..., :128] @ layer.kv_b_proj.weight.T).unflatten(2, (4, 14))
    shared = kept[..., None, 128:].expand(-1, -1, 4, -1)
    key, value = torch.cat([up[..., :8], shared], -1), up[..., 8:]
    return attended(query, key, value, config.window, (8 + rope) ** -0.5) @ layer.o_proj.weight.T


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_layer_reads_what_is_read_back(name, kind):
    """As a text, and in chunks, of which MLA takes some absorbed; rounding what is rounded changes nothing more."""
    config = LAYERS[name]
    layer = config.build(D).eval()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    x = torch.randn(B, L, D)
    by_hand = (grouped if name in GROUPED else latent)(layer, x, oracle(kind))
    for cuts in ([0, L], [0, 12, 15, *range(16, L + 1)]):
        sizes = {"batch_size": B, "capacity": L, "dtype": x.dtype, "device": x.device}
        cache = RoundedCache(config, kv_dtypes[kind](), **sizes)
        parts = [layer(x[:, a:b], cache=cache) for a, b in pairwise(cuts)]
        assert (torch.cat(parts, 1) - by_hand).abs().max() <= 1e-12 * by_hand.abs().max()
    if kind not in ("fp32",):
        assert (layer(x) - by_hand).abs().max() > 1e-6 * by_hand.abs().max()


class Keeps(DynamicCache):
    """transformers' cache, whose keys and values are rounded as they come in."""

    def __init__(self, rounding):
        super().__init__()
        self.rounding = rounding

    def update(self, key_states, value_states, layer_idx, *given, **more):
        return super().update(
            self.rounding(key_states), self.rounding(value_states), layer_idx, *given, **more
        )


class Turns(torch.nn.Module):
    """Its angles in float64; transformers computes them in float32."""

    def forward(self, x, position_ids):
        angle = position_ids[..., None] * 10_000.0 ** (-torch.arange(16) / 16)
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def normed(norm, x):
    """In float64; transformers computes it in float32."""
    return norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).double().eval()
    model.save_pretrained(tmp_path / "model")
    model.model.rotary_emb = Turns()
    monkeypatch.setattr(LlamaRMSNorm, "forward", normed)
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ROWS)
def test_the_loss_is_transformers_with_such_a_cache(kind, theirs, tmp_path):
    ids = np.random.default_rng(0).integers(0, 61, 65)
    text = torch.from_numpy(ids)
    logits = torch.cat(
        [
            theirs(part[None], past_key_values=Keeps(oracle(kind))).logits[0]
            for part in (text[:32], text[32:64])
        ]
    )
    wanted = torch.nn.functional.cross_entropy(logits, text[1:]).item()
    found = evaluate_text(rehead.load(tmp_path / "model"), ids, length=32, batch_size=1, kv_dtype=kind)
    assert found.loss == pytest.approx(wanted, abs=1e-12)
    assert (
        kind == "fp32"
        or abs(found.loss - evaluate_text(rehead.load(tmp_path / "model"), ids, length=32).loss) > 1e-9
    )


def gpt(layer, n_layer=2):
    return llama_shaped(*[layer] * n_layer, vocab_size=29, n_embd=D, n_hidden=32, norm_eps=1e-6)


BYTES = {
    # of 2 KV heads: 32 keys and 32 values each
    ("gqa, rope", "fp32"): 2 * 2 * 32 * 4,
    ("gqa, rope", "bf16"): 2 * 2 * 32 * 2,
    ("gqa, rope", "fp16"): 2 * 2 * 32 * 2,
    ("gqa, rope", "fp8"): 2 * 2 * 32,
    ("gqa, rope", "int8"): 2 * 2 * (32 + 4),
    ("gqa, rope", "q8_0"): 2 * 2 * 34,
    ("mla, rope", "bf16"): 320,
    ("mla, rope", "fp8"): 160,
    ("mla, rope", "int8"): 164,
    ("mla, rope", "q8_0"): 5 * 34,
}


@pytest.mark.parametrize(("name", "kind"), BYTES)
def test_bytes_count_scales(name, kind):
    config, format = gpt(LAYERS[name]), kv_dtypes[kind]()
    assert kv_bytes_per_token(config, format) == 2 * BYTES[name, kind]
    assert cache_bytes(config, 10, 3, format) == 2 * 10 * 3 * BYTES[name, kind]
    (row, *_) = plan(config, 10, 3, torch.bfloat16, kv_dtype=kind).rows
    assert (row.kv_bytes_per_token, row.cache_bytes) == (2 * BYTES[name, kind], 60 * BYTES[name, kind])


def test_gpus_share_heads_and_not_a_latent():
    assert kv_dtypes["fp8"]().token_bytes(LATENT["mla, rope"], tp=8) == 160
    assert kv_dtypes["fp8"]().token_bytes(GROUPED["mha"], tp=2) == 2 * 2 * 32


NORMED = replace(LATENT["mla, rope"], n_kv_head=4, qk_norm_eps=1e-6, qk_norm_head_dim=8)


@pytest.mark.parametrize(
    ("layer", "kind", "said"),
    [
        (
            LatentConfig(**SIZES | {"kv_lora_rank": 40}),
            "q8_0",
            "its latent has 40 numbers, not a multiple of 32",
        ),
        (
            GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=10),
            "q8_0",
            "its key has 10 numbers, not a multiple of 32",
        ),
        (GROUPED["mha"], "fp9", "Did you mean 'fp8'"),
        *(
            (NORMED, kind, "too coarse for the 1 / RMS of 4 keys in each latent row")
            for kind in ("fp8", "int8", "q8_0")
        ),
    ],
)
def test_what_has_no_such_cache_is_refused(layer, kind, said):
    with pytest.raises(ConfigError, match=said):
        plan(gpt(layer), 10, kv_dtype=kind)
    model = build(gpt(layer))
    with pytest.raises(ConfigError, match=said):
        evaluate_text(model, np.arange(20), kv_dtype=kind)


def test_as_typed(theirs, capfd, tmp_path):
    assert main(["plan", str(tmp_path / "model"), "--dtype", "bf16", "--kv-dtype", "q8_0", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["kv_dtype"] == "q8_0"
    assert found["rows"][0]["kv_bytes_per_token"] == 3 * 4 * 34
    assert main(["plan", str(tmp_path / "model"), "--kv-dtype", "fp8_ds_mla"]) == 2
    assert "fp8_ds_mla is unknown. Known: fp32, bf16, fp16, fp8, int8, q8_0." in capfd.readouterr().err
