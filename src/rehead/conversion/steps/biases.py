"""The biases of an MLA where DeepSeek's stock classes have some."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from rehead.attention import AttentionConfig, LatentConfig
from rehead.attention.latent import NORM_EPS
from rehead.conversion.base import Weights, conversions, with_bias
from rehead.conversion.steps.deepseek import SMALL, TowardsDeepSeek, as_deepseek


def after_expansion(weights: Weights, config: LatentConfig) -> Weights:
    """Return the weights with the latent's bias, if it has one, moved behind the up projection (`kv_b_proj`)."""
    if not config.down_bias:
        return weights
    latent, rope = weights["kv_a_proj_with_mqa.bias"].split([config.kv_lora_rank, config.qk_rope_head_dim])
    both = with_bias(weights, "kv_b_proj")
    moved = {
        "kv_a_proj_with_mqa.bias": torch.cat([torch.zeros_like(latent), rope]),
        "kv_b_proj.bias": both[:, -1] + both[:, :-1] @ latent,
    }
    return weights | moved


@conversions.add("fold-biases")
class FoldBiases(TowardsDeepSeek[LatentConfig, LatentConfig]):
    """Move biases to where DeepSeek's classes in transformers and mlx-lm have them (`attention_bias`).

    Those classes have biases on the down projections and on the output projection. A bias of unrotated keys adds the
    same number to all scores of a query and is dropped; a bias of values is added once, to the output. For biases of
    queries, the input with a constant appended becomes a query latent, and the up projection multiplies the constant
    by the biases. The norm of that latent is undone as in `identity-norm`.
    """

    takes = LatentConfig
    source, target = "mla with a rotary part and biases, without latent norm", "mla with DeepSeek's biases"
    costs = "The cache stays as it is. One more matrix product for the queries, as wide as the model."
    why = "a constant in a latent of the queries is multiplied by their biases"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the same with a query latent, if queries have biases."""
        has_others = source.qkv_bias or source.down_bias != source.o_bias
        if as_deepseek(target) is None or not source.qk_rope_head_dim or not has_others:
            return
        rank = d_model + 1 if source.qkv_bias else source.q_lora_rank
        yield replace(source, qkv_bias=False, down_bias=True, o_bias=True, q_lora_rank=rank)

    def refusal(self, source: LatentConfig) -> str:
        """Refuse norms on the latent or on keys, which would norm a bias too, and biases of queries with a latent."""
        if source.latent_norm:
            return "latent_norm=True: biases are moved before there is a norm"
        if source.qk_norm_eps is not None:
            return "qk_norm_eps: a key is divided by its RMS, and its bias with it"
        taken = source.qkv_bias and source.q_lora_rank is not None
        return f"q_lora_rank={source.q_lora_rank}: the queries have a latent already" if taken else ""

    def rewrite(self, weights: Weights, source: LatentConfig, result: LatentConfig) -> Weights:
        """Make the input and a 1 the latent of the queries, as small as an identity norm needs it."""
        made = dict(after_expansion(weights, source))
        rows = len(made["kv_a_proj_with_mqa.weight"])
        made.setdefault("kv_a_proj_with_mqa.bias", made["o_proj.weight"].new_zeros(rows))
        made.setdefault("o_proj.bias", made["o_proj.weight"].new_zeros(len(made["o_proj.weight"])))
        if source.q_lora_rank is not None:
            made.setdefault("q_a_proj.bias", made["q_a_proj.weight"].new_zeros(source.q_lora_rank))
        if "kv_b_proj.bias" in made:
            per_head = made.pop("kv_b_proj.bias").unflatten(0, (source.n_kv_head, -1))
            values = per_head[:, source.qk_nope_head_dim :]
            values = values.repeat_interleave(source.n_query_head // source.n_kv_head, dim=0)
            made["o_proj.bias"] = made["o_proj.bias"] + made["o_proj.weight"] @ values.flatten()
        if source.qkv_bias:
            both, root = with_bias(made, "q_proj"), math.sqrt(NORM_EPS)
            width, restored = both.shape[1] - 1, round(math.log2(root)) - SMALL
            small = torch.eye(width + 1, dtype=both.dtype) * 2.0**SMALL
            made |= {
                "q_a_proj.weight": small[:, :-1],
                "q_a_proj.bias": small[:, -1],
                "q_a_layernorm.weight": torch.full((width + 1,), 2.0**restored, dtype=both.dtype),
                "q_b_proj.weight": both * (root / 2.0 ** (SMALL + restored)),
            }
            del made["q_proj.weight"], made["q_proj.bias"]
        return made
