"""config.json as published models have it: every key of theirs is known, and sizes are transformers' own."""

import json
from dataclasses import replace

import pytest
import torch
import transformers

from rehead.checkpoint import families, read_config
from rehead.checkpoint.huggingface.base import Fields
from rehead.errors import ConfigError, InvalidInput
from rehead.measure import parameters

OLD = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "use_cache": True,
}
OLD |= {
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.44.0",
}
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = [1.05 + 0.5 * i for i in range(16)]

DEEPSEEK = {
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "attention_bias": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def sizes(kind, vocab, width, hidden, layers, heads, length, **more):
    named = {"model_type": kind, "vocab_size": vocab, "hidden_size": width, "intermediate_size": hidden}
    named |= {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": length}
    return OLD | named | more


PUBLISHED = {
    "SmolLM2-135M": sizes(
        "llama", 49152, 576, 1536, 30, 9, 8192, num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=100000,
        rope_scaling=None, rope_interleaved=False, is_llama_config=True, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=True, **{"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    ),
    "Llama-3.2-1B": sizes(
        "llama", 128256, 2048, 8192, 16, 32, 131072, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=LLAMA3 | {"rope_type": "llama3"}, tie_word_embeddings=True,
    ),
    "Llama-2-7b": sizes(
        "llama", 32000, 4096, 11008, 32, 32, 4096, num_key_value_heads=32, rms_norm_eps=1e-5, rope_scaling=None,
        tie_word_embeddings=False,
    ),
    "Mistral-7B-v0.3": sizes(
        "mistral", 32768, 4096, 14336, 32, 32, 32768, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1000000.0,
        sliding_window=None, tie_word_embeddings=False,
    ),
    "Qwen2.5-0.5B": sizes(
        "qwen2", 151936, 896, 4864, 24, 14, 32768, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0,
        sliding_window=32768, use_sliding_window=False, max_window_layers=24, use_mrope=False, tie_word_embeddings=True,
    ),
    "Qwen3-0.6B": sizes(
        "qwen3", 151936, 1024, 3072, 28, 16, 40960, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1000000, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=28,
        attention_bias=False, tie_word_embeddings=True,
    ),
    "MiniCPM3-4B": sizes(
        "minicpm3", 73448, 2560, 6400, 62, 40, 32768, num_key_value_heads=40, rms_norm_eps=1e-5, q_lora_rank=768,
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, scale_emb=12, scale_depth=1.4, dim_model_base=256,
        rope_scaling={
            "type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS,
            "original_max_position_embeddings": 32768,
        },
    ),
    "Qwen3-30B-A3B": sizes(
        "qwen3_moe", 151936, 2048, 6144, 48, 32, 40960, num_key_value_heads=4, head_dim=128, rms_norm_eps=1e-6,
        rope_theta=1000000.0, rope_scaling=None, sliding_window=None, use_sliding_window=False, max_window_layers=48,
        attention_bias=False, tie_word_embeddings=False, decoder_sparse_step=1, mlp_only_layers=[], num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True, output_router_logits=False,
        router_aux_loss_coef=0.001,
    ),
    "DeepSeek-V2-Lite": sizes(
        "deepseek_v2", 102400, 2048, 10944, 27, 16, 163840, num_key_value_heads=16, rms_norm_eps=1e-6, **DEEPSEEK,
        moe_intermediate_size=1408, n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax",
        norm_topk_prob=False, routed_scaling_factor=1.0, rope_theta=10000, rope_scaling={
            "type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    ),
    "Moonlight-16B-A3B": sizes(
        "deepseek_v3", 163840, 2048, 11264, 27, 16, 8192, num_key_value_heads=16, rms_norm_eps=1e-5, **DEEPSEEK,
        moe_intermediate_size=1408, n_group=1, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid",
        norm_topk_prob=True, routed_scaling_factor=2.446, rope_theta=50000.0, rope_scaling=None, ep_size=1,
        num_nextn_predict_layers=1,
    ),
    "Youtu-LLM-2B": sizes(
        "youtu", 128256, 2048, 6144, 32, 16, 131072, num_key_value_heads=16, rms_norm_eps=1e-6, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_theta=1600000,
        rope_interleave=True, attention_bias=False, tie_word_embeddings=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name, tmp_path):
    table = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(table))
    ours = read_config(tmp_path)
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    learned = [
        part.numel() for name, part in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    assert parameters(ours) == model.num_parameters() + sum(learned)
    kind = ours.attention[0]
    width = getattr(kind, "qk_rope_head_dim", 0) or kind.head_dim
    rotary = type(model.model.rotary_emb)(theirs)  # not on meta
    frequencies = kind.rope.frequencies(width)
    torch.testing.assert_close(frequencies, rotary.inv_freq.double(), rtol=1e-6, atol=0)
    assert (kind.rope.scaling.magnitude if kind.rope.scaling else 1.0) == rotary.attention_scaling
    again = families[table["model_type"]].write(ours)
    assert {key: again[key] for key in ("rope_theta", "tie_word_embeddings")} == {
        "rope_theta": theirs.rope_parameters["rope_theta"],
        "tie_word_embeddings": theirs.tie_word_embeddings,
    }


CONTRADICTIONS = {
    "theta": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "rope_theta": 10000.0},
    "kind": {
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "factor": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
}


@pytest.mark.parametrize("rope", CONTRADICTIONS.values(), ids=list(CONTRADICTIONS))
def test_old_and_new_words_that_contradict_are_refused(rope, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(sizes("llama", 53, 24, 40, 1, 4, 64) | rope))
    with pytest.raises(InvalidInput, match=r"in rope_parameters and .* outside it"):
        read_config(tmp_path)


def test_longrope_of_two_lists_is_refused_beyond_the_first(tmp_path):
    """Angles that change within a text do not fit the keys in its cache."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    scaling["original_max_position_embeddings"] = 32
    table = sizes("llama", 53, 24, 40, 1, 4, 64, rope_scaling=scaling)
    (tmp_path / "config.json").write_text(json.dumps(table))
    with pytest.raises(InvalidInput, match="Set max_position_embeddings=32"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(table | {"max_position_embeddings": 32}))
    assert read_config(tmp_path).attention[0].rope.scaling.factors == (1.0, 1.0, 1.0)


def longrope(tmp_path, **more):
    """Phi-3 as the message on two lists advises: cut to its first length, with the factor of the longer one."""
    same = [1.0] * 3
    scaling = {"type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.19} | more
    sizes_of = sizes("phi3", 53, 24, 40, 1, 4, 64, original_max_position_embeddings=64, rope_scaling=scaling)
    (tmp_path / "config.json").write_text(json.dumps(sizes_of | {"pad_token_id": 0}))
    return tmp_path


def test_longropes_factor_is_written_for_vllm_too(tmp_path):
    """It takes short_mscale and long_mscale, and 1 without them where the length is the first one."""
    ours = read_config(longrope(tmp_path))
    table = families["phi3"].write(ours)
    for key in ("rope_parameters", "rope_scaling"):
        assert table[key]["short_mscale"] == table[key]["long_mscale"] == 1.19
    theirs = transformers.Phi3Config(**table)
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(theirs)
    assert rotary.attention_scaling == 1.19
    assert families["phi3"].read(Fields(table, "config.json")) == ours
    plain = read_config(longrope(tmp_path, attention_factor=1.0))
    assert "short_mscale" not in families["phi3"].write(plain)["rope_scaling"]


def test_another_mscale_of_longrope_is_refused_by_name(tmp_path):
    assert read_config(longrope(tmp_path, short_mscale=1.19)) == read_config(longrope(tmp_path))
    with pytest.raises(InvalidInput, match=r"longrope long_mscale=1.3, .* is 1.19: .* in rope_scaling"):
        read_config(longrope(tmp_path, short_mscale=1.19, long_mscale=1.3))


def test_longrope_of_wide_heads_is_not_phi3s(tmp_path):
    """transformers' config counts its factors by hidden_size / num_attention_heads, whatever head_dim says."""
    table = families["phi3"].write(read_config(longrope(tmp_path)))
    wide = {"hidden_size": 16, "head_dim": 6}
    with pytest.raises(Exception, match="short_factor field must have length 2, got 3"):
        transformers.Phi3Config(**table | wide)
    with pytest.raises(InvalidInput, match=r"head_dim=6 with longrope: .* num_attention_heads=4 only"):
        families["phi3"].read(Fields(table | wide, "config.json"))
    llama = families["llama"].read(Fields(sizes("llama", 53, 16, 40, 1, 4, 64, head_dim=6), "config.json"))
    rope = families["phi3"].read(Fields(table, "config.json")).attention[0].rope
    layers = tuple(replace(layer, rope=rope) for layer in llama.attention)
    with pytest.raises(
        ConfigError, match="Phi3ForCausalLM cannot represent this model's head_dim with longrope"
    ):
        families["phi3"].write(replace(llama, attention=layers))
    odd = table | {"hidden_size": 27}
    assert (
        transformers.Phi3Config(**odd).hidden_size == families["phi3"].read(Fields(odd, "config.json")).n_embd
    )
