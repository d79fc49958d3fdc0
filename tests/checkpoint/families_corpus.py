"""A good config.json of every family that reads more keys than Llama's, and values that it must refuse."""

SMALL = {
    "vocab_size": 11,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GOOD = {
    "smollm3": {"num_key_value_heads": 2, "no_rope_layers": [1, 0]},
    "phi3": {"num_key_value_heads": 2},
    "gpt_neox": {"rotary_pct": 0.34},
    "olmo2": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 6},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 6},
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
}
"""A tensor that Llama does not have, or that another layer has in another way."""


def config(kind):
    """A good config.json of a family."""
    return SMALL | {"model_type": kind} | GOOD[kind]


def bad_configs():
    """Names and tables of config.json with one value that is wrong."""
    for kind, keys in BAD.items():
        for name, values in keys.items():
            for value in values:
                yield f"C28 {kind} {name}={value!r:.40}", config(kind) | {name: value}
