"""Models that a user has changed by hand decode what `forward` computes, in every engine, or are refused by C++."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from rehead import decoding
from rehead.attention import EMPTY, GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.program import Embed, PerHead, Program
from rehead.attention.rope import Rotary
from rehead.config import RNNConfig
from rehead.decoding.native_limits import refusal
from rehead.decoding.native_op import kernel
from rehead.decoding.native_program import NativeProgram
from rehead.decoding.torch_engine import TorchProgram
from rehead.errors import UsageError
from rehead.model import build
from rehead.native import KernelUnavailable
from rehead.nn.norm import ZeroCenteredRMSNorm
from small import llama_shaped

B, V, D = 3, 23, 16
GQA = GroupedConfig(n_query_head=4, n_kv_head=2, head_dim=8, rope=RopeConfig())
MLA = LatentConfig(n_query_head=4, n_kv_head=2, kv_lora_rank=6, qk_nope_head_dim=8, v_head_dim=5)
REBUILT = replace(MLA, rope=RopeConfig(), qk_norm_eps=1e-6)
ENGINES = {"torch": decoding.torch_decoder, "C++": decoding.native_decoder}
HAS_CPP = not isinstance(kernel(), KernelUnavailable)


def llama(attention, **other):
    return llama_shaped(attention, attention, vocab_size=V, n_embd=D, n_hidden=20, norm_eps=1e-5, **other)


def made(config):
    torch.manual_seed(0)
    model = build(config).eval()
    for weight in model.parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3)
    return model.float()


def fewer_units(model):
    for layer in model.layers:
        mlp = layer.mlp
        for part in (mlp.gate_proj, mlp.up_proj):
            part.weight = nn.Parameter(part.weight[::2].contiguous())
        mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight[:, ::2].contiguous())


def fewer_outputs(model):
    model.head.weight = nn.Parameter(model.head.weight[: V - 4].contiguous())


def no_key_norm(model):
    for layer in model.layers:
        layer.self_attn.k_norm = None


def no_query_norm(model):
    for layer in model.layers:
        layer.self_attn.q_norm = None


def no_mlp_norm(model):
    for layer in model.layers:
        layer.post_attention_layernorm = nn.Identity()


def fewer_query_heads(model):
    for layer in model.layers:
        rows = torch.arange(32).view(2, 2, 8)[:, 0].flatten()  # the first head of each group
        q_proj, o_proj = layer.self_attn.q_proj, layer.self_attn.o_proj
        q_proj.weight = nn.Parameter(q_proj.weight[rows])
        o_proj.weight = nn.Parameter(o_proj.weight[:, rows].contiguous())


def centred_key_norm(model):
    for layer in model.layers:
        layer.self_attn.k_norm = nn.LayerNorm(8).float()
        layer.self_attn.k_norm.weight.data += torch.rand(8)


def offset_key_norm(model):
    for layer in model.layers:
        layer.self_attn.k_norm = ZeroCenteredRMSNorm(8, 1e-6).float()
        layer.self_attn.k_norm.weight.data += torch.rand(8)


class Same(nn.Module):
    def forward(self, x):
        return x


def same_mlp_norm(model):
    for layer in model.layers:
        layer.post_attention_layernorm = Same()


def latent_norm(model):
    for layer in model.layers:
        layer.self_attn.kv_a_layernorm = nn.RMSNorm(6).float()
        layer.self_attn.kv_a_layernorm.weight.data += torch.rand(6)


class Reversed(Rotary):
    def apply(self, x, cos, sin):
        return super().apply(x, cos, -sin)


def own_rotation(model):
    model.layers[1].self_attn.rotary = Reversed(GQA.rope, 8)


CHANGES = {
    "fewer hidden units": (llama(GQA), fewer_units),
    "a trimmed vocabulary": (llama(GQA), fewer_outputs),
    "a GQA without a key norm": (llama(replace(GQA, qk_norm_eps=1e-6)), no_key_norm),
    "a GQA without a query norm": (llama(replace(GQA, qk_norm_eps=1e-6)), no_query_norm),
    "an MLA without a query norm": (llama(replace(MLA, qk_norm_eps=1e-6)), no_query_norm),
    "a parallel MLP without a norm": (llama(GQA, parallel_residual=True), no_mlp_norm),
    "a parallel MLP with a norm that is none": (llama(GQA, parallel_residual=True), same_mlp_norm),
    "a norm of latents": (llama(replace(MLA, latent_norm=False)), latent_norm),
    "a rotation of its own": (llama(GQA), own_rotation),
    "a GQA of fewer query heads": (llama(GQA), fewer_query_heads),
    "a modular GQA of fewer query heads": (
        llama(replace(GQA, head_map="modular", rope=None), learned_positions=True),
        fewer_query_heads,
    ),
    "rebuilt keys": (llama(REBUILT), lambda _: None),
    "rebuilt keys with centred norms": (llama(REBUILT), centred_key_norm),
    "rebuilt keys with norms of another formula": (llama(REBUILT), offset_key_norm),
}
REFUSED = {
    "a parallel MLP with a norm that is none": "Same",
    "a rotation of its own": "a rotation of its own",
    "rebuilt keys with centred norms": "LayerNorm",
    "rebuilt keys with norms of another formula": "ZeroCenteredRMSNorm",
}


@torch.no_grad()
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CHANGES)
def test_decoded_is_forward(name, engine):
    config, change = CHANGES[name]
    model = made(config)
    change(model)
    ids = torch.randint(model.head.weight.shape[0], (B, 9))
    wanted = model(ids)
    if engine == "C++" and (not HAS_CPP or name in REFUSED):
        assert REFUSED.get(name, "") in decoding.native_refusal(model)
        return
    cache, decode = model.new_cache(B), ENGINES[engine](model)
    model(ids[:, :3], cache=cache)
    got = torch.stack([decode(one, cache) for one in ids[:, 3:].T], 1)
    torch.testing.assert_close(got, wanted[:, 3:], atol=2e-5, rtol=2e-5)


def one_bias_for_all(model):
    model.layers[0].mlp.up_proj.bias = nn.Parameter(torch.ones(1).float())


def wider_positions(model):
    model.embed_positions.weight.data = torch.randn(64, 2 * D).float()


def fewer_positions(model):
    model.embed_positions.weight.data = model.embed_positions.weight.data[:10]


def wider_keys(model):
    k_proj = model.layers[0].self_attn.k_proj
    k_proj.weight = nn.Parameter(torch.cat([k_proj.weight] * 2))


def narrower_keys(model):
    k_proj = model.layers[0].self_attn.k_proj
    k_proj.weight = nn.Parameter(k_proj.weight[:8].contiguous())


def wider_sum(model):
    o_proj = model.layers[1].self_attn.o_proj
    o_proj.weight = nn.Parameter(torch.cat([o_proj.weight, o_proj.weight[:8]]))


def narrower_gate(model):
    gate_proj = model.layers[1].mlp.gate_proj
    gate_proj.weight = nn.Parameter(gate_proj.weight[:10].contiguous())


def three_query_heads(model):
    attention = model.layers[0].self_attn
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight[:24].contiguous())
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :24].contiguous())


@torch.no_grad()
@pytest.mark.skipif(not HAS_CPP, reason="no kernel")
@pytest.mark.parametrize(
    ("config", "change", "why"),
    [
        (llama(GQA), wider_keys, "heads of other widths than their rotation"),
        (llama(GQA), narrower_keys, "heads of other widths than their rotation"),
        (llama(GQA, parallel_residual=True), wider_sum, "a sum of different widths"),
        (llama(GQA), narrower_gate, "a gate of another width than what it multiplies"),
        (llama(GQA), three_query_heads, "query heads that its KV heads do not divide"),
    ],
)
def test_what_forward_cannot_compute_is_refused_by_cpp(config, change, why):
    """It would write beyond its buffers, in a decoder that is used without `forward`."""
    model = made(config)
    change(model)
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randint(V, (B, 3)))
    assert decoding.native_refusal(model) == why


@torch.no_grad()
@pytest.mark.skipif(not HAS_CPP, reason="no kernel")
@pytest.mark.parametrize("change", [wider_keys, narrower_keys])
def test_keys_wider_than_their_cache_are_not_written(change):
    model = made(llama(replace(GQA, rope=None), learned_positions=True))
    change(model)
    width = len(model.layers[0].self_attn.k_proj.weight) // 2
    with pytest.raises(
        UsageError, match=f"layer 0 computes a key of {width} numbers, its cache has rows of 8"
    ):
        decoding.native_decoder(model)(torch.zeros(B, dtype=torch.long), model.new_cache(B))


@pytest.mark.skipif(not HAS_CPP, reason="no kernel")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (one_bias_for_all, "a bias of another width than its linear layer"),
        (wider_positions, "embeddings of different widths"),
        (fewer_positions, "an embedding with fewer rows than the config says"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_cpp(change, why):
    model = made(llama(replace(GQA, rope=None), learned_positions=True))
    assert decoding.native_refusal(model) is None
    change(model)
    assert decoding.native_refusal(model) == why


@torch.no_grad()
def test_a_call_that_fails_can_be_repeated():
    """With hooks on it, a model is decoded by its own calls: no layer has counted the token of one that failed."""
    model = made(llama(GQA))
    fails = []

    def hook(module, inputs, output):
        if fails:
            raise MemoryError

    model.layers[1].mlp.register_forward_hook(hook)
    decode, cache = decoding.decoder(model), model.new_cache(B)
    ids = torch.randint(V, (B, 6))
    wanted = model(ids)
    model(ids[:, :4], cache=cache)
    fails.append(1)
    with pytest.raises(MemoryError):
        decode(ids[:, 4], cache)
    fails.clear()
    got = torch.stack([decode(one, cache) for one in ids[:, 4:].T], 1)
    torch.testing.assert_close(got, wanted[:, 4:], atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_an_rnns_call_that_fails_can_be_repeated():
    """No layer's state has read the token of one that failed, in whichever layer."""
    model = build(RNNConfig(vocab_size=V, block_size=8, n_embd=5, n_hidden=7, n_output=V, n_layer=3)).eval()
    ids, fails = torch.randint(V, (B, 6)), []

    def hook(module, inputs, output):
        if module in fails:
            raise MemoryError

    for module in (*model.layers, model.head):
        module.register_forward_hook(hook)
    decode, cache = decoding.decoder(model), model.new_cache(B)
    got = []
    for one, failing in zip(ids.T, [*model.layers, model.head, None, None], strict=True):
        fails[:] = [failing]
        if failing is not None:
            with pytest.raises(MemoryError):
                decode(one, cache)
        fails.clear()
        got.append(decode(one, cache))
    torch.testing.assert_close(torch.stack(got, 1), model(ids))


@torch.no_grad()
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_fails_can_be_repeated(engine, ragged, monkeypatch):
    """No cache has counted its token."""
    if engine == "C++" and not HAS_CPP:
        pytest.skip("no kernel")
    model = made(llama_shaped(GQA, replace(GQA, window=4), vocab_size=V, n_embd=D, n_hidden=20))
    ids = torch.randint(V, (B, 12))
    lengths = torch.tensor([6, 2, 5] if ragged else [6, 6, 6])[:, None]
    positions = torch.where(torch.arange(6) < lengths, torch.arange(6), EMPTY) if ragged else None

    def steps(failing):
        cache, decode, rows = model.new_cache(B), ENGINES[engine](model), []
        model(ids[:, :6], positions, cache)
        for number, one in enumerate(ids[:, 6:].T):
            if number in failing:
                with monkeypatch.context() as patch:
                    for program in (NativeProgram, TorchProgram):
                        patch.setattr(program, "__call__", fail)
                    with pytest.raises(MemoryError):
                        decode(one, cache)
            rows.append(decode(one, cache))
        return torch.stack(rows), [part.n_token for part in cache]

    def fail(*_):
        raise MemoryError

    (got, counts), (wanted, counted) = steps({0, 3}), steps(set())
    assert torch.equal(got, wanted)
    assert counts == counted


@pytest.mark.parametrize(
    ("bias", "transposed", "view", "refused"),
    [
        (False, False, False, False),
        (True, True, False, False),
        (True, False, False, True),
        (False, False, True, True),
        (False, True, True, True),
    ],
)
def test_matrices_of_heads_in_another_order_are_refused_by_cpp(bias, transposed, view, refused):
    weight = torch.randn(2, 4, 4)
    program = Program()
    x = program.add(Embed(nn.Embedding(5, 8), None, 1.0)).split(2)
    per_head = PerHead(x, weight.mT if view else weight, torch.randn(2, 4) if bias else None, transposed)
    program.add(per_head)
    why = "matrices of heads in an order that C++ does not read"
    assert refusal(program) == (why if refused else None)
