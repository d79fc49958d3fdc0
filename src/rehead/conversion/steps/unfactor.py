"""Out of a latent: its two projections multiplied out, on the keys' side or on the queries'."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.conversion.base import ExactConversion, Weights, common, conversions, projections
from rehead.conversion.fit.factor import accepts_arrays
from rehead.errors import ConfigError


def obstacle(source: LatentConfig) -> str:
    """Return why the projections of a latent attention cannot be multiplied out, empty if they can."""
    if source.latent_norm:
        return "latent_norm=True: a norm between the down and the up projection"
    if source.down_bias:
        return "down_bias=True: a bias between the down and the up projection"
    if source.q_lora_rank is not None:
        return f"q_lora_rank={source.q_lora_rank} has a norm between the two projections of the queries"
    if source.qk_rope_head_dim:
        return f"qk_rope_head_dim={source.qk_rope_head_dim}: its heads rotate in part only"
    return ""


def up_projections(config: LatentConfig, rows: Float[Tensor, "N *R"]) -> tuple[Tensor, Tensor]:
    """Return the rows of `kv_b_proj` that make keys (K E *R), and those that make values (K V *R)."""
    per_head = rows.unflatten(0, (config.n_kv_head, -1))
    keys, values = per_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return keys, values


@conversions.add("expand")
class Expand(ExactConversion[LatentConfig, GroupedConfig]):
    """Multiply out the down and up projections: every KV head has keys and values of its own again."""

    takes = LatentConfig
    source, target = "mla without latent norm", "mha, gqa, mqa"
    costs = "The cache grows from R to K (E + V) numbers a token; keys need not be rebuilt any more."
    why = "W_UK W_DKV and W_UV W_DKV are multiplied out"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[GroupedConfig]:
        """Yield as many KV heads as the latent expands to."""
        yield GroupedConfig(**common(source), n_kv_head=source.n_kv_head, head_dim=source.qk_nope_head_dim)

    def refusal(self, source: LatentConfig) -> str:
        """Refuse anything between the two projections."""
        return obstacle(source)

    def rewrite(self, weights: Weights, source: LatentConfig, result: GroupedConfig) -> Weights:
        """Multiply out W_UK W_DKV and W_UV W_DKV."""
        made = projections(weights, "q_proj", "o_proj", "q_norm", "k_norm")
        down, names = weights["kv_a_proj_with_mqa.weight"], ("k_proj", "v_proj")
        for name, up in zip(names, up_projections(source, weights["kv_b_proj.weight"]), strict=True):
            made[f"{name}.weight"] = up.flatten(0, 1) @ down
        if source.qkv_bias:
            for name, bias in zip(names, up_projections(source, weights["kv_b_proj.bias"]), strict=True):
                made[f"{name}.bias"] = bias.flatten()
        return made


@conversions.add("reduce")
class Reduce(ExactConversion[LatentConfig, GroupedConfig]):
    """The reduced form of MLA: one KV head, the latent itself, for keys and values alike.

    The up projection of the keys is folded into the query projection, that of the values into the output projection:
    the products that absorbed MLA computes for every token are computed once and stored in the weights. A bias of
    the keys adds the same number to all scores of a query and is dropped; a bias of the values is added once, to the
    output.
    """

    takes = LatentConfig
    source, target = "mla without rope or latent norm", "mqa with tie_kv=True, R wide"
    costs = (
        "The cache stays R numbers a token. Queries and output projection grow from H E and H V to H R, "
        "and so do the products over the past: good for decoding, not for training."
    )
    why = "(W_UK c).(W_Q x) = c.(W_UK^T W_Q x)"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[GroupedConfig]:
        """Yield MQA as wide as the latent."""
        rank, bias = source.kv_lora_rank, source.o_bias or source.qkv_bias
        wide = common(source) | {"v_head_dim": rank, "o_bias": bias}
        yield GroupedConfig(**wide, n_kv_head=1, head_dim=rank, tie_kv=True)

    def refusal(self, source: LatentConfig) -> str:
        """Refuse anything between the two projections, and rotated keys."""
        if source.qk_norm_eps is not None:
            return "qk_norm_eps: keys are normed between W_UK and W_Q"
        rotated = "with rope=True, rebuilt keys are rotated between W_UK and W_Q"
        return obstacle(source) or (rotated if source.rope is not None else "")

    def rewrite(self, weights: Weights, source: LatentConfig, result: GroupedConfig) -> Weights:
        """Fold the expansion into queries and output projection."""
        n_head, group = source.n_query_head, source.n_query_head // source.n_kv_head

        def per_query_head(rows: Tensor) -> list[Tensor]:
            return [up.repeat_interleave(group, dim=0).flatten(0, 1) for up in up_projections(source, rows)]

        key_up, value_up = per_query_head(weights["kv_b_proj.weight"])
        names = ("kv_a_proj_with_mqa", "q_proj", "o_proj")
        down, query, output = (weights[f"{name}.weight"] for name in names)
        reduced = reduced_matrices(down, key_up, value_up, query, output, n_head)
        made = {"k_proj.weight": reduced.key, "q_proj.weight": reduced.query, "o_proj.weight": reduced.output}
        if source.o_bias:
            made["o_proj.bias"] = weights["o_proj.bias"]
        if source.qkv_bias:
            column = weights["q_proj.bias"][:, None]
            made["q_proj.bias"] = reduced_matrices(down, key_up, value_up, column, output, n_head).query[:, 0]
            made["k_proj.bias"] = torch.zeros_like(down[:, 0])
            shift = output @ per_query_head(weights["kv_b_proj.bias"])[1]
            made["o_proj.bias"] = shift + made.get("o_proj.bias", 0)
        return made


class Reduced(NamedTuple):
    """Key and value (both R x C), query (H R x D) and output (D x H R) projections."""

    key: Tensor
    value: Tensor
    query: Tensor
    output: Tensor


@accepts_arrays
def reduced_matrices(
    down: Float[Tensor, "R C"],
    key_up: Float[Tensor, "HE R"],
    value_up: Float[Tensor, "HV R"],
    query: Float[Tensor, "HE D"],
    output: Float[Tensor, "M HV"],
    n_head: int,
) -> Reduced:
    """Return the weights of the reduced form, whose scale is 1/sqrt(R): `reduced_matrices` of docs/sources.md (A).

    The queries are multiplied by sqrt(R / E), since MHA's scale is 1/sqrt(E); document A divides by it. Arrays
    may be NumPy's or torch's. Raises ConfigError for an `n_head` that does not divide the heads' rows.
    """
    sizes = {"key_up": len(key_up), "value_up": len(value_up), "query": len(query), "output": output.shape[1]}
    if n_head < 1 or any(size % n_head for size in sizes.values()):
        stacked = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise ConfigError(
            f"n_head={n_head} does not divide the rows of all heads ({stacked}). Use a number of heads that divides "
            "each."
        )
    rank, width = down.shape[0], key_up.shape[0] // n_head
    keys, values = (up.unflatten(0, (n_head, -1)) for up in (key_up, value_up))
    queries = torch.einsum("her,hed->hrd", keys, query.unflatten(0, (n_head, -1)))
    outputs = torch.einsum("mhv,hvr->mhr", output.unflatten(1, (n_head, -1)), values)
    return Reduced(down, down, queries.flatten(0, 1) * math.sqrt(rank / width), outputs.flatten(1))
