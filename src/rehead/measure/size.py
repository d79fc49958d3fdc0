"""Sizes computed from the config alone; tests compare them with the built model.

A multiply-add is 2 FLOPs. Only matrix products count, and causality is ignored except by `prompt_flops`.
"""

import torch

from rehead.attention import AttentionConfig, LatentConfig
from rehead.config import GPTConfig, ModelConfig, RNNConfig
from rehead.errors import UsageError
from rehead.measure.kv_dtype import KVDtype


def _require_config(config: object) -> None:
    """Refuse what is no config, such as the model itself."""
    if not isinstance(config, GPTConfig | RNNConfig):
        raise UsageError(
            f"config is a {type(config).__name__}: sizes follow from a config. Use model.config, or "
            "rehead.checkpoint.read_config(path)."
        )


def parameters(config: ModelConfig) -> int:
    """Return the number of parameters; a tied head counts once."""
    _require_config(config)
    if isinstance(config, GPTConfig):
        width = config.n_embd
        embeddings = width * config.vocab_size * (1 if config.tie_embeddings else 2)
        positions = width * config.block_size * config.learned_positions
        norm = width * (2 if config.norm == "layernorm" else 1)
        norms = norm * (4 if config.norm_position == "both" else 2)
        mlps = _mlps(config)
        if config.mlp_bias:
            mlps += config.n_layer * (width + config.n_hidden * (2 if config.gated else 1))
        if config.experts is not None and config.experts.has_correction:
            mlps += len(config.experts.layers) * config.experts.n_routed_experts
        attention = sum(layer.n_parameters(width) for layer in config.attention)
        return embeddings + positions + attention + mlps + config.n_layer * norms + norm
    assert isinstance(config, RNNConfig)
    hidden = config.n_hidden
    inputs = config.n_embd + hidden * (config.n_layer - 1)
    layers = inputs * hidden + config.n_layer * (hidden * hidden + hidden)
    both = 0 if config.direction == "forward" else layers + (2 * hidden + 1) * hidden
    return config.vocab_size * config.n_embd + layers + both + (hidden + 1) * config.n_output


def active_parameters(config: ModelConfig, n_token: int = 1) -> int:
    """Return the number of parameters that `n_token` tokens use: all but those of experts that none of them chooses.

    This is an upper bound: each token chooses experts that no other token has chosen, as long as there are any.
    """
    if not isinstance(config, GPTConfig):
        return parameters(config)
    return parameters(config) - _mlps(config) + _mlps(config, n_token)


def forward_flops(config: ModelConfig, n_token: int) -> int | float:
    """Return FLOPs per token of one forward pass over `n_token` tokens."""
    _require_config(config)
    if isinstance(config, GPTConfig):
        seen = [min(n_token, layer.window or n_token) for layer in config.attention]
        attention = sum(
            layer.projection_flops(config.n_embd) + layer.attention_flops(n_key)
            for layer, n_key in zip(config.attention, seen, strict=True)
        )
        return attention + 2 * (_mlps(config, 1) + config.n_embd * config.vocab_size)
    assert isinstance(config, RNNConfig)
    hidden = config.n_hidden
    inputs = config.n_embd + hidden * (config.n_layer - 1)
    layers = 2 * hidden * (inputs + config.n_layer * hidden)
    head = 2 * hidden * config.n_output
    if config.direction == "forward":
        return layers + head
    passes = 1 if config.direction == "bidirectional" else (n_token + 1) / 2
    return (2 * layers + 4 * hidden * hidden) * passes + head


def training_flops(config: ModelConfig, n_token: int, *, train: str = "all") -> int | float:
    """Return FLOPs per token of a training step on `n_token` tokens: three forward passes if all weights learn.

    With `train` "attention", the gradients of all other matrices are not computed. What is recomputed in the backward
    pass does not count.
    """
    steps = 3 * forward_flops(config, n_token)
    if train == "all":
        return steps
    assert isinstance(config, GPTConfig)
    return steps - 2 * (_mlps(config, 1) + config.n_embd * config.vocab_size)


def prefill_flops(config: ModelConfig, n_token: int) -> int | float:
    """Return FLOPs of prefill with `n_token` tokens: a forward pass with logits of the last token only."""
    if isinstance(config, GPTConfig):
        head = 2 * config.n_embd * config.vocab_size
    else:
        assert isinstance(config, RNNConfig)
        head = 2 * config.n_hidden * config.n_output
    return n_token * forward_flops(config, n_token) - (n_token - 1) * head


def prompt_flops(config: ModelConfig, n_token: int) -> int | float:
    """Return the least FLOPs of reading a prompt into an empty cache, where no query computes the keys after it.

    They are those of `prefill_flops` without these pairs, and with latents that are absorbed where that is chosen.
    """
    flops, d_model = prefill_flops(config, n_token), config.n_embd
    for layer in config.attention if isinstance(config, GPTConfig) else ():
        seen = min(n_token, layer.window or n_token)
        hidden = seen * (seen - 1) // 2  # of the first queries, which see 1, 2, ... keys
        flops -= layer.attention_flops(hidden)
        if isinstance(layer, LatentConfig) and not layer.rebuilds_keys and n_token < layer.absorbs_below:
            n_pair = n_token * seen - hidden
            per_token, per_pair = layer.decode_flops(d_model, 0), layer.decode_flops(d_model, 1)
            flops += n_token * per_token + n_pair * (per_pair - per_token)
            flops -= n_token * layer.projection_flops(d_model) + layer.attention_flops(n_pair)
    return flops


def decode_flops(config: ModelConfig, n_token: int) -> int:
    """Return FLOPs of the step that decodes token number `n_token`, with the others in the cache."""
    if not isinstance(config, GPTConfig):
        if is_recomputed(config):
            return int(prefill_flops(config, n_token))
        return int(forward_flops(config, 1))
    attention = sum(
        layer.decode_flops(config.n_embd, min(n_token, layer.window or n_token)) for layer in config.attention
    )
    return attention + 2 * (_mlps(config, 1) + config.n_embd * config.vocab_size)


def decode_bytes(
    config: ModelConfig,
    n_token: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    kv_dtype: KVDtype | None = None,
    tp: int = 1,
) -> int:
    """Return the bytes that a decoding step reads: weights once, and the cache of every sequence.

    The cache has the weights' `dtype` unless it has a `kv_dtype`. Of `tp` GPUs under tensor parallelism each reads its
    part of the weights and the cache it holds: together these bytes, or less where heads do not divide.

    Of the experts, only those chosen count, as if every sequence chose different ones.
    """
    tables = config.vocab_size * config.n_embd  # of which a step reads one row
    if isinstance(config, GPTConfig):
        tables *= not config.tie_embeddings
        tables += config.block_size * config.n_embd * config.learned_positions
    weights = (active_parameters(config, batch_size) - tables) * dtype.itemsize
    return weights + tp * cache_bytes(config, n_token, batch_size, kv_dtype or dtype, tp)


def is_recomputed(config: ModelConfig) -> bool:
    """Whether a model reads the whole text again for every token: an RNN that also reads it backwards."""
    return isinstance(config, RNNConfig) and config.direction != "forward"


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype | KVDtype = torch.float32, tp: int = 1) -> int:
    """Return the bytes one token adds to the cache of all layers, before a window is full; 0 for an RNN.

    With `tp` these are the bytes on the fullest of `tp` GPUs under tensor parallelism.
    """
    _require_config(config)
    if isinstance(config, GPTConfig):
        return sum(_token_bytes(layer, dtype, tp) for layer in config.attention)
    return 0


def cache_bytes(
    config: ModelConfig,
    n_token: int,
    batch_size: int = 1,
    dtype: torch.dtype | KVDtype = torch.float32,
    tp: int = 1,
) -> int:
    """Return the bytes of the cache after `n_token` tokens: a window keeps min(T, W) rows, an RNN one state.

    `tp` is as in `kv_bytes_per_token`.
    """
    if isinstance(config, GPTConfig):
        return batch_size * sum(
            _token_bytes(layer, dtype, tp) * min(n_token, layer.window or n_token)
            for layer in config.attention
        )
    assert isinstance(config, RNNConfig)
    assert isinstance(dtype, torch.dtype), "an RNN has no KV cache"
    if is_recomputed(config):
        return 0
    return config.n_layer * config.n_hidden * batch_size * dtype.itemsize


def _token_bytes(layer: AttentionConfig, dtype: torch.dtype | KVDtype, tp: int) -> int:
    if isinstance(dtype, torch.dtype):
        return layer.kv_numbers(tp) * dtype.itemsize
    return dtype.token_bytes(layer, tp)


def _mlps(config: GPTConfig, n_token: int | None = None) -> int:
    """Return the elements of the matrices of MLPs and routers; of experts, only those that `n_token` tokens can use."""
    matrices = config.n_embd * (3 if config.gated else 2)
    experts = config.experts
    if experts is None:
        return config.n_layer * matrices * config.n_hidden
    n_expert = experts.n_routed_experts
    if n_token is not None:
        n_expert = min(n_expert, n_token * experts.num_experts_per_tok)
    hidden = (n_expert + experts.n_shared_experts) * experts.moe_intermediate_size
    mixture = matrices * hidden + config.n_embd * experts.n_routed_experts
    n_mixture = len(experts.layers)
    return (config.n_layer - n_mixture) * matrices * config.n_hidden + n_mixture * mixture
