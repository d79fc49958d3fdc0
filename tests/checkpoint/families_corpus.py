"""A good config.json of every family that reads more keys than Llama's, and values that it must refuse."""

SMALL = {
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LATENT = {
    "kv_lora_rank": 6, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
    "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 9,
}  # fmt: skip
GOOD = {
    "mistral": {"num_key_value_heads": 2, "sliding_window": 8},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 6},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0]},
    "phi3": {"num_key_value_heads": 2},
    "gpt_neox": {"rotary_pct": 0.34},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 6},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 6},
    "qwen3_moe": {
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 9,
        "mlp_only_layers": [0],
    },
    "deepseek_v2": LATENT | {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1},
    "youtu": {key: LATENT[key] for key in list(LATENT)[:5]},
    "minicpm3": {key: LATENT[key] for key in list(LATENT)[:5]} | {"q_lora_rank": 8},
}
SIZES = (0, -1, 2.5, "x", None, 10**6, 10**30)
EXPERTS = {
    "num_experts_per_tok": (*SIZES, 4),
    "moe_intermediate_size": (0, -1, 2.5, "x", None, 10**30),
}
DEEPSEEK = EXPERTS | {
    "n_routed_experts": (0, -1, 2.5, "x", 10**6, 10**30, 5),
    "n_shared_experts": (0, -1, 2.5, None, 10**6),
    "first_k_dense_replace": (-1, 2.5, "x"),
    "n_group": (0, 4, -1, 2.5, 10**6),
    "topk_group": (0, 3, -1, 2.5),
    "routed_scaling_factor": (0, -1, "x", 1e400),
    "moe_layer_freq": (2, "x"),
    "scoring_func": ("tanh", 1),
    "topk_method": ("other", 1),
    "norm_topk_prob": (1, "x"),
}
TYPES = (["other"] * 2, ["full_attention"], "full_attention", [["full_attention"], {}])
FLAT = {"rope_theta": 500.0, "rope_type": "default"}
BAD = {
    "smollm3": {
        "no_rope_layers": ([1], [1, 2], [1, "0"], [1, None], {}, "1"),
        "no_rope_layer_interval": (0, -1, 2.5),
        "layer_types": TYPES,
        "partial_rotary_factor": (0.5,),
    },
    "phi3": {
        "partial_rotary_factor": (0, -0.5, 1.5, 0.2, "x", 1e400),
        "sliding_window": (0, -1, 2.5),
        "attention_bias": (True,),
        "original_max_position_embeddings": (2.5, "x"),
        "rope_scaling": (
            {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": 2},
        ),
    },
    "gpt_neox": {
        "rotary_pct": (0, -1, 1.5, 0.2, "x"),
        "rotary_emb_base": (0, "x"),
        "hidden_act": ("relu", 1, {}),
        "use_parallel_residual": (1, "x"),
        "layer_norm_eps": (0, -1),
        "num_attention_heads": (0, 5),
    },
    "olmo2": {"rms_norm_eps": (0, -1), "hidden_act": ("gelu",), "attention_bias": (1,)},
    "granite": dict.fromkeys(
        ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
        (0, -1, "x", 1e309),
    ),
    "glm": {"partial_rotary_factor": (0, 2, 0.15), "head_dim": (0, 7)},
    "glm4": {"partial_rotary_factor": (0, 2, 0.15), "attention_bias": ("x",)},
    "gemma2": {
        "attn_logit_softcapping": (0, -1, "x", 1e400),
        "final_logit_softcapping": (0, -1, "x", 1e400),
        "query_pre_attn_scalar": (0, -1, "x"),
        "hidden_activation": ("relu", 3),
        "use_bidirectional_attention": (True,),
        "layer_types": TYPES,
    },
    "gemma3_text": {
        "attn_logit_softcapping": (3.0,),
        "sliding_window_pattern": (0, -1, 2.5),
        "rope_local_base_freq": (0, -1, "x"),
        "rope_parameters": (FLAT, {"full_attention": 3}, {"sliding_attention": {"rope_type": "x"}}),
        "layer_types": TYPES,
    },
    "qwen3_moe": EXPERTS
    | {
        "num_experts": (-1, 2.5, "x", 10**6, 10**30),
        "num_local_experts": (4, -1),
        "decoder_sparse_step": (0, -1, 2.5),
        "mlp_only_layers": ([2], [-1], ["0"], "0", {}, [None]),
        "norm_topk_prob": (1, "x"),
        "sliding_window": (2.5,),
    },
    "deepseek_v2": DEEPSEEK | {"num_experts": (7,), "norm_topk_prob": (True,)},
    "deepseek_v3": DEEPSEEK | {"num_local_experts": (7,)},
}
SPECIAL = {
    "smollm3": "model.layers.1.self_attn.k_proj.weight",
    "phi3": "model.layers.1.self_attn.qkv_proj.weight",
    "gpt_neox": "gpt_neox.layers.1.attention.query_key_value.bias",
    "olmo2": "model.layers.1.self_attn.q_norm.weight",
    "granite": "model.layers.1.mlp.gate_proj.weight",
    "glm": "model.layers.1.mlp.gate_up_proj.weight",
    "glm4": "model.layers.1.post_mlp_layernorm.weight",
    "gemma2": "model.layers.1.pre_feedforward_layernorm.weight",
    "gemma3_text": "model.layers.1.self_attn.k_norm.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.2.up_proj.weight",
    "deepseek_v2": "model.layers.1.mlp.shared_experts.down_proj.weight",
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
}
"""A tensor that Llama does not have, or that another layer has in another way."""

UNCONVERTIBLE = ("deepseek_v2", "deepseek_v3")
"""Refused by `convert` before any weight is looked at: no conversion leads from a normed latent to heads."""


def config(kind):
    """A good config.json of a family."""
    return SMALL | {"model_type": kind} | GOOD[kind]


def bad_configs():
    """Names and tables of config.json with one value that is wrong."""
    for kind, keys in BAD.items():
        for name, values in keys.items():
            for value in values:
                yield f"C28 {kind} {name}={value!r:.40}", config(kind) | {name: value}
