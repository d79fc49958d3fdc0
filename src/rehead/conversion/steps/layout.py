"""Exact permutations: the order of query heads, and which numbers of a head form a rotated pair."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, grouped_config
from rehead.attention.rope import Layout
from rehead.conversion.base import ExactConversion, Weights, conversions


@conversions.add("head-map")
class HeadMap(ExactConversion[GroupedConfig, GroupedConfig]):
    """Reorder the query heads so that the ones that share a KV head are adjacent, or strided.

    In the contiguous order (Hugging Face's), query head h reads KV head h // (H/K); in the modular order (document A
    in docs/sources.md), KV head h mod K. Rows of the query projection and columns of the output projection move.
    """

    takes = GroupedConfig
    source, target = "mha, gqa, mqa", "the same with the other head_map"
    costs = "Nothing."
    why = "heads are renumbered"

    def steps(self, source: GroupedConfig, target: AttentionConfig, d_model: int) -> Iterator[GroupedConfig]:
        """Yield the other order."""
        other: grouped_config.HeadMap = "modular" if source.head_map == "contiguous" else "contiguous"
        yield replace(source, head_map=other)

    def rewrite(self, weights: Weights, source: GroupedConfig, result: GroupedConfig) -> Weights:
        """Permute query rows and output columns by head."""
        order = torch.arange(source.n_query_head)  # position -> the head of `source` that goes there
        if source.head_map == "modular":
            order = order.unflatten(0, (source.group, source.n_kv_head)).T.flatten()
        else:
            order = order.unflatten(0, (source.n_kv_head, source.group)).T.flatten()
        moved = dict(weights)
        whole = ("q_norm.weight", "q_norm.bias") if source.qk_norm_over == "projection" else ()
        for name in ("q_proj.weight", "q_proj.bias", *whole):
            if name in weights:
                moved[name] = weights[name].unflatten(0, (source.n_query_head, -1))[order].flatten(0, 1)
        columns = weights["o_proj.weight"].unflatten(1, (source.n_query_head, -1))
        moved["o_proj.weight"] = columns[:, order].flatten(1)
        return moved


@conversions.add("rope-layout")
class RopeLayout(ExactConversion[AttentionConfig, AttentionConfig]):
    """Reorder the elements of each head so that the two of a rotated pair are half a head apart, or adjacent.

    The half-split layout pairs (i, i + E/2), as Hugging Face does; the interleaved layout pairs (2i, 2i + 1), as
    RoFormer and Meta's own files do. Rows of the query and key projections move.
    """

    takes = GroupedConfig | LatentConfig
    source, target = "any with rope", "the same with the other rope layout"
    costs = "Nothing."
    why = "the numbers of each head are renumbered"

    def steps(
        self, source: AttentionConfig, target: AttentionConfig, d_model: int
    ) -> Iterator[AttentionConfig]:
        """Yield the other layout."""
        if source.rope is not None:
            other: Layout = "interleaved" if source.rope.layout == "half-split" else "half-split"
            yield replace(source, rope=replace(source.rope, layout=other))

    def refusal(self, source: AttentionConfig) -> str:
        """Refuse a learned score, which has weights per number of a head."""
        if isinstance(source, GroupedConfig) and source.rope and source.score.n_parameters(1, 2):
            return f"a learned score ({type(source.score).__name__}) is not renumbered with the heads"
        return ""

    def rewrite(self, weights: Weights, source: AttentionConfig, result: AttentionConfig) -> Weights:
        """Permute the rotated rows of queries and keys."""
        assert result.rope is not None
        moved = dict(weights)
        for name, (n_head, start, end) in _rotated(source).items():
            for key in (f"{name}.weight", f"{name}.bias"):
                if key in weights:
                    rows = weights[key].unflatten(0, (n_head, -1)).clone()
                    rows[:, start:end] = paired(rows[:, start:end], result.rope.layout)
                    moved[key] = rows.flatten(0, 1)
        return moved


def paired(rows: Float[Tensor, "H E *C"], layout: Layout) -> Float[Tensor, "H E *C"]:
    """Return the rows of each head, moved from the other layout to `layout`."""
    if layout == "half-split":
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


def _rotated(config: AttentionConfig) -> dict[str, tuple[int, int, int]]:
    """Return, by projection with rotated rows, the number of heads, and the first such row of a head and its end."""
    assert config.rope is not None
    if isinstance(config, GroupedConfig):
        width = config.rope.rotated(config.head_dim)
        heads = {"q_proj": config.n_query_head, "k_proj": config.n_kv_head}
        whole = config.qk_norm_over == "projection"
        heads |= {"q_norm": config.n_query_head if whole else 1, "k_norm": config.n_kv_head if whole else 1}
        return {name: (n_head, 0, width) for name, n_head in heads.items()}
    assert isinstance(config, LatentConfig)
    query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
    nope = config.qk_nope_head_dim
    if config.rebuilds_keys:
        rotated = config.rope.rotated(nope)
        heads = {query: config.n_query_head, "kv_b_proj": config.n_kv_head, "q_norm": 1, "k_norm": 1}
        return {name: (n_head, 0, rotated) for name, n_head in heads.items()}
    rank, both = config.kv_lora_rank, nope + config.qk_rope_head_dim
    query = query if config.qk_norm_head_dim is None else "q_up_proj"
    return {
        query: (config.n_query_head, nope, both),
        "kv_a_proj_with_mqa": (1, rank, rank + config.qk_rope_head_dim),
    }
