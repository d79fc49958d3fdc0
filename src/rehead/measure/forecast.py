"""Bytes that work will take, from the config, before it begins.

Tests compare these estimates with what a process takes: they are within a factor of 1.5 of it.
"""

import torch

from rehead.attention import AttentionConfig, GroupedConfig
from rehead.config import GPTConfig, ModelConfig, RNNConfig
from rehead.measure import logits
from rehead.measure.size import cache_bytes, forward_flops

FLOAT = 4
"""Bytes of a number in float32, in which kernels and losses compute."""
DRAW = 2
"""Bytes of a random number that decides about an attention weight."""
MASK_BYTES = 5
"""Bytes per prompt and pair of tokens of the mask of prompts of different lengths: bools, and what they become."""
KEPT = 1.5
"""What a process takes, relative to its tensors: an allocator keeps some of what was freed."""
MOST_BLOCKS, MOST_TOKENS, MOST_FLOPS = 32, 8192, 2**42
"""Default limits of one batch; more are not faster, and a batch is what progress counts."""
BATCH_BYTES = 2**29
"""Activations and logits of one batch, by default."""


def forward_bytes(config: ModelConfig, batch_size: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of a forward pass over (B, L) tokens without gradients, beside weights, cache and logits.

    At the peak these are the largest part of one layer (queries, keys, values and what was attended to, or the hidden
    layer of the MLP) and three times the residual stream. Narrow dtypes have copies in float32, and a learned score
    has the weights of all pairs of tokens.
    """
    n_token, size = batch_size * length, dtype.itemsize
    copy = FLOAT if size < FLOAT else 0
    if isinstance(config, GPTConfig):
        mlp = _mlp_bytes(config, size, copy)
        heads = max(layer.attention_flops(1) for layer in config.attention)  # at least what all four have
        pairs = max(_pair_bytes(layer) for layer in config.attention)
        stream = 3 * config.n_embd * size
        return int(KEPT * n_token * (stream + max(mlp, heads * (size + copy)))) + n_token * length * pairs
    assert isinstance(config, RNNConfig)
    return int(KEPT * n_token * size * (config.n_embd + 4 * config.n_hidden))


def loss_bytes(config: ModelConfig, n_token: int, dtype: torch.dtype) -> int:
    """Return the bytes of the logits that are held at a time to compute the loss of `n_token` tokens."""
    size = dtype.itemsize
    return min(logits.LOGITS, n_token * config.vocab_size) * (size + 2 * FLOAT if size < FLOAT else 2 * size)


def batch_of(
    config: ModelConfig,
    length: int,
    dtype: torch.dtype,
    free: int,
    batch_size: int | None = None,
    *,
    use_cache: bool = False,
) -> tuple[int, dict[str, int]]:
    """Return how many blocks of `length` tokens are read at once, and the bytes this takes by what holds them.

    With `use_cache` each block has a KV cache of its own. Without a `batch_size`, as many as fit 8,192 tokens, 4 TFLOP,
    0.5 GB and half of what is `free`, but at least one.
    """
    kept = cache_bytes(config, length, dtype=dtype) if use_cache else 0
    if batch_size is None:
        rest = min(BATCH_BYTES, free // 2) - loss_bytes(config, MOST_TOKENS, dtype)
        one = max(1, forward_bytes(config, 1, length, dtype) + kept)
        quick = int(MOST_FLOPS // (length * forward_flops(config, length)))
        batch_size = max(1, min(MOST_BLOCKS, MOST_TOKENS // length, rest // one, quick))
    return batch_size, {
        "activations": forward_bytes(config, batch_size, length, dtype),
        "logits": loss_bytes(config, batch_size * length, dtype),
        **({"cache": batch_size * kept} if use_cache else {}),
    }


def generation_bytes(
    config: ModelConfig,
    batch_size: int,
    prompt: int,
    new: int,
    dtype: torch.dtype,
    *,
    use_cache: bool = True,
    n_distinct: int | None = None,
    ragged: bool = False,
) -> dict[str, int]:
    """Return the bytes of generating `new` tokens after a prompt, beside the weights, by what holds them.

    With a cache, equal prompts are read once: there are `n_distinct`, by default all. A full context is read again from
    its later half on, in every row. Of `ragged` prompts, whose lengths differ, the longest has `prompt` tokens; all
    that are read at once have a mask, and a full context is read again as a whole.
    """
    limit = config.context_limit or prompt + new
    whole = min(prompt + new, limit)
    passes = [forward_bytes(config, batch_size, whole, dtype)]
    if use_cache:
        passes = [forward_bytes(config, n_distinct or batch_size, prompt, dtype)]
        again = limit if ragged else limit - limit // 2 + 1
        passes += [forward_bytes(config, batch_size, again, dtype)] if prompt + new > limit else []
    rows = (n_distinct or batch_size) * prompt**2
    if not use_cache or prompt + new > limit:
        rows = max(rows, batch_size * whole**2)
    return {
        **({"mask": MASK_BYTES * rows} if ragged and isinstance(config, GPTConfig) else {}),
        "activations": max(passes),
        "cache": cache_bytes(config, whole, batch_size, dtype) if use_cache else 0,
        "logits": batch_size * config.vocab_size * (dtype.itemsize + 5 * FLOAT),  # two copies in float64
    }


def map_bytes(config: GPTConfig, length: int) -> int:
    """Return the bytes of the attention maps of all layers of one text, and of computing those of a layer."""
    numbers = [layer.n_map * length**2 for layer in config.attention]
    return FLOAT * (sum(numbers) + 3 * max(numbers))


def step_bytes(
    config: GPTConfig, batch_size: int, length: int, *, recompute: bool = False, draws: bool = False
) -> int:
    """Return the bytes that a forward pass in float32 over (B, L) tokens keeps for its gradients, without logits.

    With `recompute` these are the inputs of all layers, and everything of one. With `draws` the random numbers of
    dropped attention weights are among them, as on a CPU: two bytes per head and pair of tokens.
    """
    kept = 4 * config.n_embd + _mlp_numbers(config)
    layers = [
        kept
        + layer.attention_flops(1)
        + length * (_pair_bytes(layer) // FLOAT)
        + (
            layer.n_map * min(length, layer.window or length) * DRAW / FLOAT
            if draws and layer.attn_pdrop
            else 0
        )
        for layer in config.attention
    ]
    per_token = max(layers) + len(layers) * config.n_embd if recompute else sum(layers)
    return int(KEPT * FLOAT * batch_size * length * per_token)


def _mlp_bytes(config: GPTConfig, size: int, copy: int) -> int:
    """Return the bytes per token at the peak of the largest MLP; of a mixture, in one expert that all tokens chose."""
    hidden = max((3 if config.gated else 2) * size, size + copy)
    experts = config.experts
    if experts is None:
        return config.n_hidden * hidden
    router = FLOAT * (4 * experts.n_routed_experts + 8 * experts.num_experts_per_tok)
    rows = config.n_embd * (3 * size + FLOAT)  # an expert's input and output, its share, the sum
    expert = rows + experts.moe_intermediate_size * hidden
    shared = config.n_embd * size + experts.n_shared_experts * experts.moe_intermediate_size * hidden
    dense = config.n_hidden * hidden if len(experts.layers) < config.n_layer else 0
    return max(dense, router + max(expert, shared))


def _mlp_numbers(config: GPTConfig) -> int:
    """Return the numbers per token that the largest MLP keeps for its gradients."""
    hidden = 4 if config.gated else 2
    experts = config.experts
    if experts is None:
        return config.n_hidden * hidden
    n_expert = experts.num_experts_per_tok + experts.n_shared_experts
    rows = 4 * experts.n_routed_experts + 3 * config.n_embd * experts.num_experts_per_tok
    mixture = rows + n_expert * experts.moe_intermediate_size * hidden
    return max(mixture, config.n_hidden * hidden if len(experts.layers) < config.n_layer else 0)


def _pair_bytes(attention: AttentionConfig) -> int:
    """Return the bytes that a learned score takes per pair of tokens; 0 for the dot product."""
    if not isinstance(attention, GroupedConfig) or attention.score.build(1, 1, 2) is None:
        return 0
    units = getattr(attention.score, "width", 0)
    return attention.n_query_head * FLOAT * (4 + 2 * units)
