"""Attention maps of stock folders: those that transformers gives out itself."""

import pytest
import torch
import transformers

import rehead
from rehead.measure.attention_maps import attention_maps

transformers.utils.logging.disable_progress_bar()
BASE = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 10,
}
LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 14,
    "q_lora_rank": 11,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
}
FAMILIES = {
    "GPT2": {"vocab_size": 53, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 64},
    "Llama": BASE,
    "Mistral": BASE | {"sliding_window": 4},
    "Qwen2": BASE | {"use_sliding_window": False},
    "Qwen3": BASE,
    "DeepseekV3": BASE | LATENT,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_c1_the_maps_are_those_of_transformers(name, tmp_path):
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name], attn_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in theirs.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(2, 53, (11,))
    expected = theirs(ids[None], output_attentions=True).attentions
    ours = attention_maps(rehead.load(tmp_path / "theirs"), ids)
    assert len(ours) == len(expected) == 3
    for mine, their in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, their[0].detach(), atol=2e-6, rtol=1e-4)
