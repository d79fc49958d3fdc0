"""More KV heads by repeating them, exactly; fewer by pooling them, approximately."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.attention.grouped_config import divisors
from rehead.conversion.base import (
    Conversion,
    Converted,
    ExactConversion,
    Promise,
    Statistics,
    Weights,
    conversions,
    projections,
    with_bias,
)
from rehead.conversion.fit import align


@conversions.add("repeat-heads")
class RepeatHeads(ExactConversion[GroupedConfig | LatentConfig, GroupedConfig | LatentConfig]):
    """Copy each KV head as often as needed: every MQA is also a GQA, and every GQA an MHA.

    The heads that a latent expands to are copied in the same way; the latent stays as it is.
    """

    takes = GroupedConfig | LatentConfig
    source, target = "mqa, gqa; mla with fewer KV heads", "gqa, mha; mla"
    costs = "The key and value weights grow with the number of KV heads, and so does a cache of heads."

    def steps(
        self, source: GroupedConfig | LatentConfig, target: AttentionConfig, d_model: int
    ) -> Iterator[GroupedConfig | LatentConfig]:
        """Yield every multiple that divides the query heads."""
        if isinstance(source, LatentConfig) or source.head_map == "contiguous":
            for n_kv_head in divisors(source.n_query_head):
                if n_kv_head > source.n_kv_head and not n_kv_head % source.n_kv_head:
                    yield replace(source, n_kv_head=n_kv_head)

    def promise(
        self, source: GroupedConfig | LatentConfig, result: GroupedConfig | LatentConfig, d_model: int
    ) -> Promise:
        """Promise exactness: heads are copied."""
        return Promise(
            exact=True,
            why=f"{source.n_kv_head} KV heads are copied to {result.n_kv_head}, so every query head reads what it read",
        )

    def rewrite(
        self, weights: Weights, source: GroupedConfig | LatentConfig, result: GroupedConfig | LatentConfig
    ) -> Weights:
        """Copy the rows that make keys and values."""
        copies = result.n_kv_head // source.n_kv_head
        more = dict(weights)
        whole = isinstance(source, GroupedConfig) and source.qk_norm_over == "projection"
        copied = ("k_proj", "v_proj", "kv_b_proj", "k_scale_proj", *(["k_norm"] if whole else []))
        for name, weight in projections(weights, *copied).items():
            heads = weight.unflatten(0, (source.n_kv_head, -1))
            more[name] = heads.repeat_interleave(copies, dim=0).flatten(0, 1)
        return _with_scores(more, result)


@conversions.add("pool-heads")
class PoolHeads(Conversion[GroupedConfig, GroupedConfig]):
    """Replace each group of neighbouring KV heads by one head (Ainslie et al., arXiv 2305.13245).

    `procrustes` first turns the heads of a group onto each other, keys together with their queries and values
    together with the output projection, which changes no output yet; with rope, keys only turn in ways that commute
    with its rotation. Then it takes the mean and restores its norm. `mean` takes the mean of the heads as they are,
    `first` keeps the first head; these two read no text. Heads with norms on queries and keys (Qwen3) cannot be
    turned: the norm has a weight for each element of a head, and a turn mixes the elements.
    """

    takes = GroupedConfig
    source, target = "mha, gqa", "gqa, mqa"
    costs = "The cache and the key and value weights shrink with the number of KV heads. Heal it."
    methods: ClassVar[dict[str, tuple[str, ...]]] = {"procrustes": (), "mean": (), "first": ()}
    fitted = frozenset({"procrustes"})

    def steps(self, source: GroupedConfig, target: AttentionConfig, d_model: int) -> Iterator[GroupedConfig]:
        """Yield every smaller number of heads that divides the present one."""
        for n_kv_head in divisors(source.n_kv_head)[:-1] if source.head_map == "contiguous" else []:
            yield replace(source, n_kv_head=n_kv_head)

    def promise(self, source: GroupedConfig, result: GroupedConfig, d_model: int) -> Promise:
        """Promise an approximation: heads differ."""
        left = "one" if result.n_kv_head == 1 else str(result.n_kv_head)
        return Promise(exact=False, why=f"{source.n_kv_head} KV heads become {left}")

    def refusal(self, source: GroupedConfig) -> str:
        """Refuse norms over all heads, and tied heads, which cannot be aligned as keys and as values."""
        if source.qk_norm_over != "head":
            return f"qk_norm_over={source.qk_norm_over}: one norm over all heads has no meaning for fewer"
        return "tie_kv=True makes keys and values one" if source.tie_kv else ""

    def unusable(self, source: GroupedConfig) -> dict[str, str]:
        """Refuse to turn heads with norms: the norm's weight differs by number, so it does not commute with a turn."""
        reason = "qk_norm_eps: the weight of the norm on keys does not commute with a turn of the head"
        return {} if source.qk_norm_eps is None else {"procrustes": reason}

    def convert(
        self,
        weights: Weights,
        source: GroupedConfig,
        result: GroupedConfig,
        statistics: Statistics,
        method: str,
    ) -> Converted:
        """Pool keys and values of every group of neighbours."""
        pooled = dict(weights)
        moment = statistics.inputs
        readers = {"k_proj": ("q_proj", 0), "v_proj": ("o_proj", 1)}
        lost = energy = apart = size = 0.0
        for name, (reader, side) in readers.items():
            members = source.n_kv_head // result.n_kv_head
            heads = with_bias(weights, name).unflatten(0, (result.n_kv_head, members, -1))
            one = heads[:, 0]
            if method == "procrustes":
                heads, turns, one = _aligned(heads, moment, source, keys=name == "k_proj")
                _turn(pooled, reader, side, turns, source.group)
            elif method == "mean":
                one = one + (heads - heads[:, :1]).mean(dim=1)  # the copies of one head have itself as mean
            lost += float(align.energy(heads - one[:, None], moment).sum())
            energy += float(align.energy(heads, moment).sum())
            apart += float((heads - one[:, None]).square().sum())
            size += float(heads.square().sum())
            rows = one.flatten(0, 1)
            pooled[f"{name}.weight"] = rows[:, :-1]
            if source.qkv_bias:
                pooled[f"{name}.bias"] = rows[:, -1]
        return Converted(
            weights=_with_scores(pooled, result),
            lost=max(lost, 0.0) / energy if energy else 0.0,
            residual=apart / size if size else 0.0,
        )


def _aligned(
    heads: Float64[Tensor, "K M E C"], moment: align.Covariance, source: GroupedConfig, *, keys: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return turned heads, the turn of each as an E x E matrix, and the head that replaces each group."""
    if keys and source.score.n_parameters(1, 1):  # a learned score would have to turn too
        eye = torch.eye(heads.shape[2], dtype=torch.float64)
        return heads, eye.expand(*heads.shape[:2], -1, -1), heads.mean(dim=1)
    find: align.Align = align.procrustes
    if keys and source.rope is not None:
        planar = align.planar_half_split if source.rope.layout == "half-split" else align.planar_interleaved
        find = partial(align.in_parts, planar, source.rope.rotated(source.head_dim))
    groups = [find(group, moment) for group in heads]
    turned, turns, one = (torch.stack(part) for part in zip(*groups, strict=True))
    return turned, turns, one


def _turn(weights: Weights, name: str, side: int, turns: Float64[Tensor, "K M E E"], group: int) -> None:
    """Turn, in place, the rows of the queries or columns of the output that belong to each old KV head."""
    per_head = turns.flatten(0, 1).repeat_interleave(group, dim=0)  # H E E
    matrix = weights[f"{name}.weight"].movedim(side, 0).unflatten(0, (len(per_head), -1))
    turned = torch.einsum("hef,hf...->he...", per_head, matrix).flatten(0, 1)
    weights[f"{name}.weight"] = turned.movedim(0, side)
    if side == 0 and f"{name}.bias" in weights:
        bias = weights[f"{name}.bias"].unflatten(0, (len(per_head), -1))
        weights[f"{name}.bias"] = torch.einsum("hef,hf->he", per_head, bias).flatten()


def _with_scores(weights: Weights, result: GroupedConfig | LatentConfig) -> Weights:
    """Regroup a learned score's weights, one per query head, by the new KV heads."""
    grouped = {
        name: weight.flatten(0, 1).unflatten(0, (result.n_kv_head, -1))
        for name, weight in projections(weights, "score").items()
    }
    return weights | grouped
