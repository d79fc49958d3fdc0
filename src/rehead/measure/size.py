"""Sizes computed from the config alone; tests compare them with the built model.

A multiply-add is 2 FLOPs. Only matrix products count, and causality is ignored.
"""

import torch

from rehead.config import GPTConfig, ModelConfig, RNNConfig


def parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head counts once."""
    if isinstance(config, GPTConfig):
        width = config.n_embd
        embeddings = width * config.vocab_size * (1 if config.tie_embeddings else 2)
        positions = width * config.block_size * config.learned_positions
        norm = width * (2 if config.norm == "layernorm" else 1)
        norms = norm * (4 if config.norm_position == "both" else 2)
        mlp = _mlp_products(config) // 2
        if config.mlp_bias:
            mlp += width + config.n_hidden * (2 if config.gated else 1)
        attention = sum(layer.n_parameters(width) for layer in config.attention)
        return embeddings + positions + attention + config.n_layer * (mlp + norms) + norm
    assert isinstance(config, RNNConfig)
    hidden = config.n_hidden
    inputs = config.n_embd + hidden * (config.n_layer - 1)
    layers = inputs * hidden + config.n_layer * (hidden * hidden + hidden)
    both = 0 if config.direction == "forward" else layers + (2 * hidden + 1) * hidden
    return config.vocab_size * config.n_embd + layers + both + (hidden + 1) * config.n_output


def forward_flops(config: ModelConfig, n_token: int) -> int | float:
    """Return FLOPs per token of one forward pass over `n_token` tokens; training takes three times that."""
    if isinstance(config, GPTConfig):
        seen = [min(n_token, layer.window or n_token) for layer in config.attention]
        attention = sum(
            layer.projection_flops(config.n_embd) + layer.attention_flops(n_key)
            for layer, n_key in zip(config.attention, seen, strict=True)
        )
        return attention + config.n_layer * _mlp_products(config) + 2 * config.n_embd * config.vocab_size
    assert isinstance(config, RNNConfig)
    hidden = config.n_hidden
    inputs = config.n_embd + hidden * (config.n_layer - 1)
    layers = 2 * hidden * (inputs + config.n_layer * hidden)
    head = 2 * hidden * config.n_output
    if config.direction == "forward":
        return layers + head
    passes = 1 if config.direction == "bidirectional" else (n_token + 1) / 2
    return (2 * layers + 4 * hidden * hidden) * passes + head


def prefill_flops(config: ModelConfig, n_token: int) -> int | float:
    """Return FLOPs of prefill with `n_token` tokens: a forward pass with logits of the last token only."""
    if isinstance(config, GPTConfig):
        head = 2 * config.n_embd * config.vocab_size
    else:
        assert isinstance(config, RNNConfig)
        head = 2 * config.n_hidden * config.n_output
    return n_token * forward_flops(config, n_token) - (n_token - 1) * head


def decode_flops(config: ModelConfig, n_token: int) -> int:
    """Return FLOPs of the step that decodes token number `n_token`, with the others in the cache."""
    if not isinstance(config, GPTConfig):
        return int(forward_flops(config, 1))
    attention = sum(
        layer.decode_flops(config.n_embd, min(n_token, layer.window or n_token)) for layer in config.attention
    )
    return attention + config.n_layer * _mlp_products(config) + 2 * config.n_embd * config.vocab_size


def decode_bytes(
    config: ModelConfig, n_token: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes that a decoding step reads: all weights once, and the cache of every sequence."""
    tables = config.vocab_size * config.n_embd  # of which a step reads one row
    if isinstance(config, GPTConfig):
        tables *= not config.tie_embeddings
        tables += config.block_size * config.n_embd * config.learned_positions
    weights = (parameters(config) - tables) * dtype.itemsize
    return weights + cache_bytes(config, n_token, batch_size, dtype)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype = torch.float32) -> int:
    """Return the bytes one token adds to the cache of all layers, before a window is full; 0 for an RNN."""
    if isinstance(config, GPTConfig):
        return sum(layer.kv_numbers() for layer in config.attention) * dtype.itemsize
    return 0


def cache_bytes(
    config: ModelConfig, n_token: int, batch_size: int = 1, dtype: torch.dtype = torch.float32
) -> int:
    """Return the bytes of the cache after `n_token` tokens: a window keeps min(T, W) rows, an RNN one state."""
    if isinstance(config, GPTConfig):
        numbers = sum(
            layer.kv_numbers() * min(n_token, layer.window or n_token) for layer in config.attention
        )
    else:
        assert isinstance(config, RNNConfig)
        numbers = config.n_layer * config.n_hidden
    return numbers * batch_size * dtype.itemsize


def _mlp_products(config: GPTConfig) -> int:
    """Return FLOPs per token of one layer's MLP."""
    return 2 * config.n_embd * config.n_hidden * (3 if config.gated else 2)
