"""A latent made narrower."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from rehead.attention import AttentionConfig, LatentConfig
from rehead.conversion.base import Conversion, Converted, Promise, Statistics, Weights, conversions
from rehead.conversion.steps.biases import after_expansion
from rehead.conversion.steps.latent import METHODS, factored, full_rank, rank_on_the_way


@conversions.add("narrow")
class Narrow(Conversion[LatentConfig, LatentConfig]):
    """Make a latent narrower; a rotary part beside it stays as it is.

    The product of the latent's down and up projections is factored again. `weighted`, `whitened` and `svd` mean the
    same as in `factor`.
    """

    takes = LatentConfig
    source, target = "mla without latent norm", "mla of lower rank"
    costs = "The cache shrinks to the new rank and the rotary part."
    methods: ClassVar[dict[str, tuple[str, ...]]] = METHODS
    fitted = frozenset({"weighted", "whitened"})

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the target's rank, if it is lower, and none that a factor of the weights does not have."""
        if 0 < rank_on_the_way(target) < source.kv_lora_rank and rank_on_the_way(target) <= full_rank(
            source, d_model
        ):
            yield replace(source, kv_lora_rank=rank_on_the_way(target))

    def promise(self, source: LatentConfig, result: LatentConfig, d_model: int) -> Promise:
        """Promise exactness while the rank is enough for all that the latent is expanded to."""
        full = full_rank(source, d_model)
        if result.kv_lora_rank >= full:
            return Promise(exact=True, why=f"rank {full} holds all keys and values")
        return Promise(exact=False, why=f"rank {result.kv_lora_rank} instead of {source.kv_lora_rank}")

    def refusal(self, source: LatentConfig) -> str:
        """Refuse a latent norm, which no product of weights contains, and a bias that has no place after it."""
        if source.latent_norm:
            return "latent_norm=True: the norm is between the two factors"
        homeless = source.down_bias and not source.qkv_bias
        return "down_bias=True without qkv_bias: a bias is between the two factors" if homeless else ""

    def convert(
        self,
        weights: Weights,
        source: LatentConfig,
        result: LatentConfig,
        statistics: Statistics,
        method: str,
    ) -> Converted:
        """Factor the product of expansion and projection; biases are added after the expansion."""
        weights = after_expansion(weights, source)
        down, up = weights["kv_a_proj_with_mqa.weight"], weights["kv_b_proj.weight"]
        latent, rope = down.split([source.kv_lora_rank, source.qk_rope_head_dim])
        factors, residual = factored(up @ latent, result.kv_lora_rank, statistics, method)
        made = {
            "kv_a_proj_with_mqa.weight": torch.cat([factors.down, rope]),
            "kv_b_proj.weight": factors.up,
        }
        if source.down_bias:
            bias = weights["kv_a_proj_with_mqa.bias"][source.kv_lora_rank - result.kv_lora_rank :]
            made["kv_a_proj_with_mqa.bias"] = bias  # zeros, then those of the rotary part
        return Converted(weights=weights | made, lost=factors.lost, residual=residual)
