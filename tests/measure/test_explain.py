"""What is said of a model's ways is what it does."""

from dataclasses import replace

import pytest
import torch

from rehead import decoding
from rehead.attention import GroupedConfig, LatentConfig, RopeConfig, flash
from rehead.config import GPTConfig, RNNConfig
from rehead.decoding import graphed
from rehead.measure.explain import explain
from rehead.model import build
from rehead.native.sequence import serves

GQA = GroupedConfig(n_query_head=6, n_kv_head=2, head_dim=10, rope=RopeConfig())
MLA = LatentConfig(n_query_head=6, kv_lora_rank=9, qk_nope_head_dim=10, qk_rope_head_dim=4, v_head_dim=7)


def made(*attention):
    config = GPTConfig(
        vocab_size=23, block_size=64, n_embd=13, attention=attention, learned_positions=False, norm="rmsnorm",
        norm_eps=1e-5, mlp="gelu", n_hidden=17, mlp_bias=True,
    )  # fmt: skip
    return build(config).eval()


SAID = [
    (GQA, "folded into the rows", "texts: SDPA"),
    (replace(GQA, window=300), "folded", "chunks of the window from 600"),
    (replace(GQA, rope=None, score="additive"), "slow, a learned score", "slow, O(L^2)"),
    (MLA, "absorbed, up to", "expanded, then SDPA"),
    (replace(MLA, qk_rope_head_dim=0, rope=RopeConfig()), "rebuilt from all latents", "expanded"),
    (
        replace(MLA, n_kv_head=1, kv_lora_rank=200, v_head_dim=1, qk_nope_head_dim=1),
        "1 KV heads cost less",
        "SDPA",
    ),
]


@pytest.mark.parametrize(("config", "one", "many"), SAID)
def test_what_is_said(config, one, many):
    model = made(config, config, GQA)
    lines = explain(model)
    assert "float64" in lines[0]  # no kernel for it
    assert one in lines[1]
    assert many in lines[2]
    assert lines[1].startswith(("layers 0, 1", "layers 0, 1, 2"))
    model.float()
    lines = explain(model)
    assert ("C++ kernel, on 1 thread" in lines[0]) == (decoding.why_not(model) is None)
    assert ("the C++ kernel, " in lines[2]) == ("slow" not in many and serves(model.head.weight))


def test_a_network_without_attention():
    rnn = build(RNNConfig(vocab_size=9, block_size=9, n_embd=5, n_layer=1, n_hidden=9, n_output=9))
    assert len(explain(rnn.to(torch.float32))) == 1


def test_a_gpu_has_ways_of_its_own(monkeypatch):
    """As if this CPU were one."""
    for room in (graphed, flash):
        monkeypatch.setattr(room, "DEVICE", "cpu")
    model = made(replace(GQA, window=300), replace(GQA, window=300)).bfloat16()
    monkeypatch.setattr("rehead.measure.explain.why_not", lambda model: "the model is on cuda")
    monkeypatch.setattr("rehead.measure.explain.serves", lambda weight: False)
    lines = explain(model)
    assert lines[0] == "decoding: CUDA graphs, one per length bucket"
    assert lines[2] == (
        "layers 0, 1, gqa, texts: by windowed flash attention, if it agrees here, from 600 tokens on, SDPA before"
    )
    hook = model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "(no CUDA graphs: somebody watches" in explain(model)[0]
    hook.remove()
