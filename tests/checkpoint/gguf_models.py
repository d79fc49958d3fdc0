"""Small models of stock classes, with tokenizers that llama.cpp reads, for files that `rehead export` writes."""

import copy

import torch
import transformers

from rehead.tokenizer import train

LETTERS = "\t\n" + "".join(map(chr, range(32, 127)))
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
GQA = {"head_dim": 16}
MQA = {"num_key_value_heads": 1, "head_dim": 16}
FACTORS = [1 + 0.3 * i for i in range(8)]
SHORT, SLOW = {"original_max_position_embeddings": 32}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, **SLOW, **SHORT},
    "yarn": {"factor": 4.0, **SHORT},
    "longrope": {
        "short_factor": FACTORS,
        "long_factor": FACTORS,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.1,
    },
}
MLA = {
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
}
GPT2 = {
    "vocab_size": len(LETTERS),
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_inner": 160,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rope(kind, **more):
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **ROPES[kind], **more}}


MODELS = {
    "llama, gqa": ("Llama", GQA),
    "llama, mqa, tied": ("Llama", MQA | {"tie_word_embeddings": True}),
    "llama, biases": ("Llama", GQA | {"attention_bias": True, "mlp_bias": True}),
    **{f"llama, {kind}": ("Llama", GQA | rope(kind)) for kind in ROPES},
    "qwen2": ("Qwen2", {}),
    "qwen2, linear": ("Qwen2", rope("linear")),
    "qwen2, yarn": ("Qwen2", rope("yarn")),
    "qwen3, yarn": ("Qwen3", {"head_dim": 16, **rope("yarn", rope_theta=1e6, attention_factor=1.2)}),
    "qwen3, wide heads": ("Qwen3", {"head_dim": 32}),
    "gpt2": ("GPT2", GPT2),
    "deepseek": ("DeepseekV3", MLA),
    "deepseek, q rank": ("DeepseekV3", MLA | {"q_lora_rank": 24}),
}


def write(folder, kind, fields, tokenizer=None):
    """A folder of theirs, every weight drawn, with a tokenizer of the printable letters; and the model."""
    sizes = {} if kind in ("GPT2", "GPTNeoX") else SIZES
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(sizes | fields))  # they write into it
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer or train("char", LETTERS).to_json(), encoding="utf-8")
    return model
