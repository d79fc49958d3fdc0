"""The sum form of GQA (document B in docs/sources.md), as the equivalent MHA."""

from collections.abc import Iterator

from rehead.attention import AttentionConfig, GroupedConfig, SummedConfig
from rehead.conversion.base import ExactConversion, Weights, conversions, projections


@conversions.add("sum-queries")
class SumQueries(ExactConversion[SummedConfig, GroupedConfig]):
    """Add up the query weights of each group: the sum of the scores is the score of the summed query.

    S_i = sum_j Q_ij K_i^T = (sum_j Q_ij) K_i^T, rotated or not, so `gqa_sum` with K KV heads is MHA with K heads.
    """

    takes = SummedConfig
    source, target = "gqa_sum", "mha of its KV heads"
    costs = "The cache stays; the query weights shrink to those of the KV heads."
    why = "the sum of a group's scores is the score of its summed query"

    def steps(self, source: SummedConfig, target: AttentionConfig, d_model: int) -> Iterator[GroupedConfig]:
        """Yield the equivalent MHA."""
        yield source.equivalent()

    def rewrite(self, weights: Weights, source: SummedConfig, result: GroupedConfig) -> Weights:
        """Sum rows of the query projection."""
        summed = {
            name: weight.unflatten(0, (source.n_kv_head, -1, source.head_dim)).sum(dim=1).flatten(0, 1)
            for name, weight in projections(weights, "q_proj").items()
        }
        return weights | summed
