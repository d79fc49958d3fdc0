"""Small GGUF files as llama.cpp's converter writes them, Llama's rows permuted as there."""

import gguf
import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers

PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["t h", "th e", "Ġ the", "Ġ Ġ", "i n", "1 2"]
TOKENS = ["<|begin|>", "<|end|>", *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<think>"]
TYPES = [3, 3, *[1] * (len(TOKENS) - 3), 4]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 77,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def model(arch, **sizes):
    """Theirs, of one architecture, with every weight drawn; seen by a GGUF file in float32."""
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[arch]
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes)
    torch.manual_seed(3)
    made = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    for weight in made.parameters():
        torch.nn.init.normal_(weight, mean=0.5 if weight.dim() == 1 else 0.0, std=0.2)
    return made


def permuted(rows, n_head):
    """As `convert_hf_to_gguf.py` does to Llama's queries and keys."""
    return (
        rows.reshape(n_head, 2, rows.shape[0] // n_head // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


def renamed(theirs):
    if not theirs.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight",
        }[theirs]
    _, _, layer, rest = theirs.split(".", 3)
    part, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{PARTS[part]}.{leaf}"


def write(path, theirs, arch, kind="F32", facts=(), vocabulary=(), more=()):
    """One file; matrices quantised as `kind`. `facts`, `vocabulary` and `more` tensors come beside or instead."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    if arch == "qwen3":
        numbers |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    words = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "merges": MERGES,
        "token_type": TYPES,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    }
    everything = {f"{arch}.{name}": value for name, value in numbers.items()}
    everything |= {f"tokenizer.ggml.{name}": value for name, value in (words | dict(vocabulary)).items()}
    for key, value in (everything | dict(facts)).items():
        if value is not None:
            add(writer, key, value)
    tensors = {}
    for name, weight in theirs.state_dict().items():
        rows = weight.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = permuted(
                rows, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            tensors[renamed(name)] = rows
    for name, rows in (tensors | dict(more)).items():
        if rows is not None:
            own = gguf.GGMLQuantizationType["F32" if rows.ndim == 1 else kind]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(rows, np.float32), own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
