"""Small models of stock classes: those that mlx-lm computes, and those that `rehead export --for mlx` refuses."""

from gguf_models import GPT2, GQA, MLA, MQA, SIZES, rope

WINDOW = {"sliding_window": 8}
PART = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
WHOLE = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
ROUTED = MLA | EXPERTS | {"first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2}
NEOX = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
NEOX |= {"intermediate_size": 256, "hidden_act": "gelu_pytorch_tanh"}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}
GEMMA2 = GEMMA | {"layer_types": ["full_attention"] * 3, "attn_logit_softcapping": 3.0}
GEMMA3 = GEMMA | WINDOW | {"num_hidden_layers": 7}
LOCAL = {"rope_type": "default", "rope_theta": 500.0}
BOTH = {"rope_parameters": {"full_attention": rope("linear")["rope_parameters"], "sliding_attention": LOCAL}}
SLIDING = {"use_sliding_window": True, "max_window_layers": 0, **WINDOW}
LONGROPE = rope("longrope", attention_factor=1.0)
NO_PAD = {"pad_token_id": None}
MOE = GQA | EXPERTS | {"num_experts": 6}
DEEP = {"num_hidden_layers": 62, "first_k_dense_replace": 62, "hidden_size": 32, "intermediate_size": 32}
MINI = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
MINI |= {"num_key_value_heads": 4, "scale_emb": 1, "scale_depth": None, "dim_model_base": None}
SCALES = {"q_lora_rank": 24, "v_head_dim": 16, "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32}
SCALES |= rope(
    "longrope", attention_factor=1.0, short_factor=[1.0, 2.0, 3.0, 4.0], long_factor=[1.0, 2.0, 3.0, 4.0]
)
MODELS = {
    "llama, gqa": ("Llama", GQA),
    "llama, mqa, tied": ("Llama", MQA | {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", GQA | {"attention_bias": True, "mlp_bias": True}),
    **{f"llama, {kind}": ("Llama", GQA | rope(kind)) for kind in ("linear", "llama3", "yarn")},
    "llama, longrope": ("Llama", GQA | LONGROPE),
    "qwen2": ("Qwen2", {}),
    "qwen2, yarn": ("Qwen2", rope("yarn", mscale=0.7, mscale_all_dim=0.5)),
    "qwen3, wide heads": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn, tied": ("Qwen3", GQA | rope("yarn") | {"tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", MOE),
    "smollm3": ("SmolLM3", GQA | {"no_rope_layers": [1, 0, 1]} | NO_PAD | rope("yarn")),
    "phi3": ("Phi3", PART | NO_PAD),
    "olmo2": ("Olmo2", rope("llama3")),
    "granite": (
        "Granite",
        rope("linear") | {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
    "glm": ("Glm", GQA | WHOLE | {"attention_bias": True, "initializer_range": 0.1} | NO_PAD),
    "glm4": ("Glm4", GQA | PART | NO_PAD),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3Text", GEMMA3 | BOTH),
    "neox": ("GPTNeoX", NEOX),
    "gpt2": ("GPT2", GPT2 | {"n_inner": None, "tie_word_embeddings": True}),
    "deepseek": ("DeepseekV3", MLA),
    "deepseek, q rank, yarn": ("DeepseekV3", MLA | {"q_lora_rank": 24} | rope("yarn")),
    "deepseek, experts": ("DeepseekV3", ROUTED | {"n_group": 4, "topk_group": 2}),
}
CONVERTED = {
    "mqa": ("Llama", MQA),
    "mqa, heads of 64": ("Llama", MQA | {"head_dim": 64}),
    "mqa, linear": ("Llama", MQA | rope("linear")),
    "mqa, yarn": ("Llama", MQA | rope("yarn")),
    "gqa, by longrope": ("Llama", GQA),
    "gqa, llama3": ("Llama", GQA | rope("llama3")),
    "mha": ("Llama", GQA | {"num_key_value_heads": 4}),
    "no rope": ("SmolLM3", GQA | {"no_rope_layers": [0, 0, 0]} | NO_PAD),
}
REFUSED = {
    "mistral": ("Mistral", GQA | WINDOW, "mistral", "windows"),
    "qwen2": ("Qwen2", SLIDING, "qwen2", "windows"),
    "qwen3, windows": ("Qwen3", GQA | SLIDING, "qwen3", "windows"),
    "qwen3, biases": ("Qwen3", GQA | {"attention_bias": True}, "qwen3", "biases"),
    "qwen3 moe, windows": ("Qwen3Moe", MOE | SLIDING, "qwen3_moe", "windows"),
    "qwen3 moe, biases": ("Qwen3Moe", MOE | {"attention_bias": True}, "qwen3_moe", "biases"),
    "qwen3 moe, linear": ("Qwen3Moe", MOE | rope("linear"), "qwen3_moe", "scaled rope, linear"),
    "phi3": ("Phi3", PART | NO_PAD | WINDOW, "phi3", "windows"),
    "phi3, longrope": ("Phi3", LONGROPE | NO_PAD, "phi3", "scaled rope, longrope"),
    "phi3, wide heads": ("Phi3", {"head_dim": 32} | NO_PAD, "phi3", "head_dim"),
    "smollm3": (
        "SmolLM3",
        GQA | NO_PAD | SLIDING | {"no_rope_layers": [1, 1, 0]} | {"layer_types": ["sliding_attention"] * 3},
        "smollm3",
        "window in every layer",
    ),
    "glm": ("Glm", GQA | PART | NO_PAD, "glm", "partial_rotary_factor"),
    "glm4, tied": ("Glm4", GQA | PART | NO_PAD | {"tie_word_embeddings": True}, "glm4", "tied output head"),
    "glm4, linear": (
        "Glm4",
        GQA | NO_PAD | rope("linear", partial_rotary_factor=0.5),
        "glm4",
        "scaled rope, linear",
    ),
    "gemma2, windows": ("Gemma2", GEMMA2 | WINDOW | {"layer_types": None}, "gemma2", "windows"),
    "gemma2, biases": ("Gemma2", GEMMA2 | {"attention_bias": True}, "gemma2", "biases"),
    "gemma2, untied": ("Gemma2", GEMMA2 | {"tie_word_embeddings": False}, "gemma2", "untied output head"),
    "gemma2, no cap": (
        "Gemma2",
        GEMMA2 | {"final_logit_softcapping": None},
        "gemma2",
        "scores or logits without a cap",
    ),
    "gemma2, no cap of scores": (
        "Gemma2",
        GEMMA2 | {"attn_logit_softcapping": None},
        "gemma2",
        "scores or logits without a cap",
    ),
    "gemma2, linear": ("Gemma2", GEMMA2 | rope("linear"), "gemma2", "scaled rope, linear"),
    "gemma3, windows": (
        "Gemma3Text",
        GEMMA3 | {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
        "gemma3_text",
        "windows in other layers",
    ),
    "gemma3, few layers": (
        "Gemma3Text",
        GEMMA3 | {"num_hidden_layers": 3},
        "gemma3_text",
        "windows in other layers",
    ),
    "gemma3, cap": (
        "Gemma3Text",
        GEMMA3 | {"final_logit_softcapping": 3.0},
        "gemma3_text",
        "cap of the logits",
    ),
    "gemma3, biases": ("Gemma3Text", GEMMA3 | {"attention_bias": True}, "gemma3_text", "biases"),
    "gemma3, width": (
        "Gemma3Text",
        GEMMA3 | {"hidden_size": 48},
        "gemma3_text",
        "embed_scale that bfloat16 rounds",
    ),
    "granite": ("Granite", {"head_dim": 32}, "granite", "head_dim"),
    "neox, gelu": ("GPTNeoX", NEOX | {"hidden_act": "gelu"}, "gpt_neox", "exact gelu"),
    "neox, tied": ("GPTNeoX", NEOX | {"tie_word_embeddings": True}, "gpt_neox", "tied output head"),
    "neox, no biases": ("GPTNeoX", NEOX | {"attention_bias": False}, "gpt_neox", "attention without biases"),
    "neox, narrow": ("GPTNeoX", NEOX | {"intermediate_size": 96}, "gpt_neox", "n_hidden"),
    "neox, linear": (
        "GPTNeoX",
        NEOX | rope("linear", partial_rotary_factor=0.25),
        "gpt_neox",
        "scaled rope, linear",
    ),
    "gpt2": ("GPT2", GPT2 | {"n_inner": None}, "gpt2", "untied output head"),
    "gpt2, gelu": (
        "GPT2",
        GPT2 | {"n_inner": None, "tie_word_embeddings": True, "activation_function": "gelu"},
        "gpt2",
        "exact gelu",
    ),
    "gpt2, narrow": ("GPT2", GPT2 | {"tie_word_embeddings": True}, "gpt2", "n_hidden"),
    "llama, longrope": (
        "Llama",
        GQA | rope("longrope"),
        "llama",
        "scaled rope, longrope with attention_factor",
    ),
    "llama, yarn": (
        "Llama",
        GQA | rope("yarn", attention_factor=1.5),
        "llama",
        "scaled rope, yarn with attention",
    ),
    "llama, mscale": (
        "Llama",
        GQA | rope("yarn", mscale=0.7),
        "llama",
        "scaled rope, yarn with attention_factor",
    ),
    "half-split": ("DeepseekV3", MLA | {"rope_interleave": False}, "deepseek_v3", "rope_layout=half-split"),
    "mla, yarn": (
        "DeepseekV3",
        MLA | rope("yarn", attention_factor=1.5),
        "deepseek_v3",
        "yarn with attention_factor",
    ),
    "62 layers": ("DeepseekV3", MLA | DEEP, "deepseek_v3", "layer 61"),
    "v2": ("DeepseekV3", MLA, "deepseek_v2", "DeepseekV2ForCausalLM"),
    "youtu": ("DeepseekV3", MLA | {"tie_word_embeddings": True}, "youtu", "YoutuForCausalLM"),
    "v2, yarn": ("DeepseekV3", MLA | rope("yarn"), "deepseek_v2", "DeepseekV2ForCausalLM"),
    "minicpm3": ("MiniCPM3", MINI, "minicpm3", "MiniCPM3ForCausalLM"),
    "minicpm3, longrope": ("MiniCPM3", MINI | SCALES, "minicpm3", "MiniCPM3ForCausalLM"),
}
"""The class, its fields, the format, and a part of the refusal."""
BIAS = "self_attn.k_proj.bias"
NOT_LOADED = {
    "phi3, wide heads": "Expected shape (128, 64) but received shape (256, 64)",
    "qwen3, biases": BIAS,
    "qwen3 moe, biases": BIAS,
    "gemma2, biases": BIAS,
    "gemma3, biases": BIAS,
    "phi3, longrope": "rope_scaling must contain keys",
    "smollm3": "'full_attention' is not in list",
    "glm4, tied": "Missing 1 parameters: \nlm_head.weight",
    "gemma2, untied": "Received 1 parameters not in model: \nlm_head.weight",
    "gemma2, no cap": "incompatible function arguments",
    "gemma2, no cap of scores": "incompatible function arguments",
    "gemma3, few layers": "list index out of range",
    "granite": "Expected shape (64, 64) but received shape (128, 64)",
    "neox, tied": "model.embed_out.weight",
    "neox, no biases": "model.h.0.attention.dense.bias",
    "neox, narrow": "Expected shape (256, 64) but received shape (96, 64)",
    "gpt2": "model.lm_head.weight",
    "gpt2, narrow": "Expected shape (256, 64) but received shape (160, 64)",
    "62 layers": "model.layers.61.",
    "v2": "'NoneType' object has no attribute 'get'",
    "youtu": "Model type youtu not supported",
    "minicpm3": "incompatible function arguments",
}
"""Those that mlx-lm does not load or compute, with its words; the others are other models to it."""
CACHED = ("v2, yarn", "minicpm3, longrope")
"""Those of which it holds the keys and values of every head."""
