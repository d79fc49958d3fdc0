"""Exports as DeepSeek's class, stored in float16 and 8 bits, as transformers then computes them."""

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType, quants

from rehead.attention.latent import NORM_EPS
from rehead.conversion.export.storable import ERROR, _powers
from typed_lines import typed

IDS = torch.arange(256).view(4, 64) * 7919 % 256


def fp16(weight):
    return weight.astype(np.float16).astype(np.float32)


def q8_0(weight):
    """As llama.cpp stores it: vectors in float32."""
    if weight.ndim < 2:
        return weight
    return quants.dequantize(quants.quantize(weight, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)


def load(folder, stored=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if stored is not None:
        for weight in model.parameters():
            weight.data = torch.from_numpy(stored(weight.detach().numpy()))
    return model


def logs(model):
    with torch.no_grad():
        return model(IDS).logits.double().log_softmax(-1)


def kl(exact, model):
    return float((exact.exp() * (exact - logs(model))).sum(-1).mean())


def greedy(model):
    with torch.no_grad():
        return model.generate(IDS[:2, :8], max_new_tokens=24, min_new_tokens=24, do_sample=False).tolist()


def llama(folder, n_kv_head):
    """A Llama with norms and values of very different sizes, as trained models have."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=n_kv_head, head_dim=64, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.08,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).float().eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data *= torch.exp(0.7 * torch.randn_like(weight))
    for layer in model.model.layers:
        sizes = torch.exp2(torch.randint(-2, 3, (n_kv_head * 64, 1)))
        layer.self_attn.v_proj.weight.data *= sizes
        of_query = sizes.view(n_kv_head, 64).repeat_interleave(4 // n_kv_head, 0).flatten()
        layer.self_attn.o_proj.weight.data /= of_query
    model.save_pretrained(folder)


@pytest.mark.process
@pytest.mark.parametrize(
    ("n_kv_head", "engine"),
    [(1, "vllm"), pytest.param(1, "transformers", marks=pytest.mark.long), (2, "transformers")],
)
def test_an_export_survives_smaller_formats(n_kv_head, engine, tmp_path):
    llama(tmp_path / "llama", n_kv_head)
    words = ["export", "llama", "mla", "--format", "deepseek_v3", "--for", engine]
    [(code, _, said)] = typed(words, cwd=tmp_path)
    assert code == 0, said
    assert "keep this export" not in said
    exact, tokens = logs(load(tmp_path / "llama")), greedy(load(tmp_path / "llama"))
    assert kl(exact, load(tmp_path / "mla")) < 1e-9
    half = load(tmp_path / "mla", fp16)
    assert greedy(half) == tokens
    assert kl(exact, half) < 2 * kl(exact, load(tmp_path / "llama", fp16)) < 1e-4
    assert kl(exact, load(tmp_path / "mla", q8_0)) < 2 * kl(exact, load(tmp_path / "llama", q8_0)) < 0.1


@pytest.mark.parametrize("bias", [0.0, 1e6])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_no_text_is_changed_by_more_than_promised(spread, bias):
    """The longest latent that a norm can give, in float64."""
    torch.manual_seed(1)
    down = torch.randn(40, 48) * torch.exp2(spread * torch.randn(40, 1)) * 2.0**-40
    down[20:32] = 0  # of a padded latent
    norm, query = torch.exp2(2 * torch.randn(48)), torch.randn(16, 48)
    query[3, 5] = 100
    shift = bias * down[:32, 0].flip(0).roll(20)
    shared, rows = _powers(norm, down, shift, query, 32)
    latent, moved = down[:32] * torch.exp2(rows)[:, None] * norm, shift * torch.exp2(rows)
    worst = torch.linalg.svd(torch.cat([latent, moved[:, None]], dim=1)).Vh[0]
    worst = worst[:48] * torch.where(worst[48] < 0, -1, 1) / worst[:48].norm() * 48**0.5
    small = latent @ worst + moved
    changed = 1 - (NORM_EPS / (small.square().mean() + NORM_EPS)).sqrt()
    assert ERROR / 8 < changed < ERROR
    sizes = torch.cat([latent, moved[:, None]], dim=1).norm(dim=1)[:20]
    assert sizes.max() < 2.01 * sizes.min()
    assert shared == shared.round() > 0
    assert torch.equal(rows, rows.round())
    assert 2**13 / 2 < (query * 2**shared).abs().max() <= 2**14


def test_an_empty_latent_stays_empty():
    shared, rows = _powers(torch.ones(6), torch.zeros(5, 6), torch.zeros(3), torch.ones(4, 6), 3)
    assert shared == 0
    assert not rows.any()
