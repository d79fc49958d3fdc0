"""Into a latent: the keys and values of all heads rebuilt from a few numbers per token."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.attention.score import ScaledDot
from rehead.conversion.base import (
    Conversion,
    Converted,
    ExactConversion,
    Promise,
    Statistics,
    Weights,
    common,
    conversions,
    in_parts,
    projections,
    with_bias,
)
from rehead.conversion.fit.factor import Factors, factor

TINY = 1e-300
"""Replaces the energy of weights that are all 0."""
METHODS: dict[str, tuple[str, ...]] = {"weighted": ("pair",), "whitened": ("inputs",), "svd": ()}
"""How a matrix is factored: the preferred first, and which `Statistics` each method needs."""


def full_rank(config: GroupedConfig | LatentConfig, d_model: int) -> int:
    """Return the rank at which one latent holds all keys and values: min(K (E + V), D)."""
    key = config.head_dim if isinstance(config, GroupedConfig) else config.qk_nope_head_dim
    value = 0 if isinstance(config, GroupedConfig) and config.tie_kv else config.v_head_dim
    return min(config.n_kv_head * (key + value), config.d_context or d_model)


def other_scores(source: GroupedConfig) -> str:
    """Return what is wrong with scores that are no scaled dot products; an empty text for those."""
    if type(source.score) is ScaledDot:
        return ""
    return f"MLA has plain scaled dot products for scores, and this attention has {source.score.words()}"


def misfit(source: GroupedConfig) -> str:
    """Return what of these heads has no place beside a rotary part of MLA; an empty text if all has."""
    return other_scores(source) or other_norms(source) or ("tie_kv=True" if source.tie_kv else "")


def other_norms(source: GroupedConfig) -> str:
    """Return what is wrong with norms that are not RMSNorms of single heads; an empty text for those and for none."""
    if source.qk_norm == "layernorm" or source.qk_norm_over != "head":
        return f"qk_norm={source.qk_norm} over a {source.qk_norm_over}: a latent has RMSNorms of single heads"
    return ""


def norm_weights(weights: Weights, source: GroupedConfig) -> Weights:
    """Return the weights of the norms as those of plain RMSNorms."""
    normed = projections(weights, "q_norm", "k_norm")
    if source.qk_norm == "zero_centered_rmsnorm":
        return {name: 1 + weight for name, weight in normed.items()}
    return normed


def rank_on_the_way(target: AttentionConfig) -> int:
    """Return the rank of a latent attention or of its reduced form, 0 for any other."""
    if isinstance(target, LatentConfig):
        return target.kv_lora_rank
    return target.head_dim if isinstance(target, GroupedConfig) and target.tie_kv else 0


def factored(matrix: Tensor, rank: int, statistics: Statistics, method: str) -> tuple[Factors, float]:
    """Return the factors of a matrix by one of `METHODS`, and the share of its energy that they miss, unweighted."""
    factors = factor(matrix, rank, *statistics.weighing(METHODS.get(method, ())))
    error = (matrix - factors.up @ factors.down).square().sum() / matrix.square().sum().clamp(min=TINY)
    return factors, float(error)


def _rank(source: GroupedConfig | LatentConfig, target: AttentionConfig, d_model: int) -> int:
    """Return the rank to make of `source`: that of the target, or less where what is wider will be zeros."""
    rank = rank_on_the_way(target)
    will_be_padded = isinstance(target, LatentConfig) and target.latent_norm
    return min(rank, full_rank(source, d_model)) if will_be_padded else rank


@conversions.add("factor")
class Factor(Conversion[GroupedConfig, LatentConfig]):
    """Cache one latent per token, from which the keys and values of all heads are rebuilt.

    [W_K; W_V] is factored as one matrix, so keys and values share the latent. The result is exact from the full rank
    of that matrix on: K (E + V) or the model's width, whichever is less. With rope, rebuilt keys are rotated when
    they are read, so no rotation is lost. Norms on queries and keys are kept: rebuilt keys are normed before they are
    rotated. `weighted` keeps what affects the predictions (by their gradients on a text), `whitened` what varies on a
    text, `svd` what is large in the weights.
    """

    takes = GroupedConfig
    source, target = "mha, gqa, mqa", "mla"
    costs = (
        "The cache shrinks to R numbers a token. With rope every step rebuilds the keys of the whole past, R K E "
        "multiplications a token and layer: it saves memory, not time."
    )
    methods: ClassVar[dict[str, tuple[str, ...]]] = METHODS
    fitted = frozenset({"weighted", "whitened"})

    def steps(self, source: GroupedConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the latent of the target's rank, from contiguous heads."""
        rank = _rank(source, target, d_model)
        if source.head_map == "contiguous" and 0 < rank <= full_rank(source, d_model):
            yield LatentConfig(
                **common(source),
                n_kv_head=source.n_kv_head,
                kv_lora_rank=rank,
                qk_nope_head_dim=source.head_dim,
                latent_norm=False,
            )

    def promise(self, source: GroupedConfig, result: LatentConfig, d_model: int) -> Promise:
        """Promise exactness from full rank on."""
        full = full_rank(source, d_model)
        if result.kv_lora_rank >= full:
            return Promise(exact=True, why=f"rank {full} holds all keys and values")
        return Promise(exact=False, why=f"rank {result.kv_lora_rank} of the {full} that hold everything")

    def refusal(self, source: GroupedConfig) -> str:
        """Refuse scores other than the scaled dot product, norms other than per-head RMSNorms, and tied heads."""
        if scores := other_scores(source):
            return scores
        if norms := other_norms(source):
            return norms
        return "tie_kv=True has one latent per head already" if source.tie_kv else ""

    def convert(
        self,
        weights: Weights,
        source: GroupedConfig,
        result: LatentConfig,
        statistics: Statistics,
        method: str,
    ) -> Converted:
        """Factor the stack; biases of keys and values are added after the expansion."""
        stack = torch.cat([weights["k_proj.weight"], weights["v_proj.weight"]])
        factors, residual = factored(stack, result.kv_lora_rank, statistics, method)
        made = _scaled_queries(weights, source) | projections(weights, "o_proj")
        made["kv_a_proj_with_mqa.weight"] = factors.down
        made["kv_b_proj.weight"] = _by_head(factors.up, source)
        if source.qkv_bias:
            bias = torch.cat([weights["k_proj.bias"], weights["v_proj.bias"]])
            made["kv_b_proj.bias"] = _by_head(bias, source)
        return Converted(weights=made, lost=factors.lost, residual=residual)


def _scaled_queries(weights: Weights, source: GroupedConfig) -> Weights:
    """Return the queries' weights, with plain RMSNorms and with the score scale, for which a latent has no field."""
    normed = norm_weights(weights, source)
    scaled = [name for name in normed or weights if name.startswith("q_")]  # a norm undoes a scale before it
    queries = projections(weights, "q_proj") | normed
    return {name: w * source.relative_scale if name in scaled else w for name, w in queries.items()}


def _by_head(rows: Float[Tensor, "N *R"], source: GroupedConfig) -> Float[Tensor, "N *R"]:
    """Reorder all keys, then all values, into each head's keys, then its values (the rows of `kv_b_proj`)."""
    keys, values = rows.split([source.n_kv_head * source.head_dim, source.n_kv_head * source.v_head_dim])
    per_head = [part.unflatten(0, (source.n_kv_head, -1)) for part in (keys, values)]
    return torch.cat(per_head, dim=1).flatten(0, 1)


@conversions.add("pad-rank")
class PadRank(ExactConversion[LatentConfig, LatentConfig]):
    """Widen the latent with zeros, where layers of different ranks need the same rank."""

    takes = LatentConfig
    source, target = "mla without latent norm", "mla of higher rank"
    costs = "The cache grows to the new rank."
    why = "the new numbers of the latent are 0"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the target's rank, up to the full rank."""
        rank = _rank(source, target, d_model)
        if source.kv_lora_rank < rank <= full_rank(source, d_model):
            yield replace(source, kv_lora_rank=rank)

    def refusal(self, source: LatentConfig) -> str:
        """Refuse a latent norm: it averages over the new numbers too."""
        return "latent_norm=True would average over the zeros" if source.latent_norm else ""

    def rewrite(self, weights: Weights, source: LatentConfig, result: LatentConfig) -> Weights:
        """Append zero rows to the latent's projection and zero columns to the expansion."""
        more = result.kv_lora_rank - source.kv_lora_rank
        down, up = with_bias(weights, "kv_a_proj_with_mqa"), weights["kv_b_proj.weight"]
        latent, rope = down.split([source.kv_lora_rank, source.qk_rope_head_dim])
        padded = torch.cat([latent, down.new_zeros(more, down.shape[1]), rope])
        wider = {
            **in_parts("kv_a_proj_with_mqa", padded, biased=source.down_bias),
            "kv_b_proj.weight": torch.cat([up, up.new_zeros(len(up), more)], dim=1),
        }
        return weights | wider
