"""The sum form of CMU 10-423's homework (B in docs/sources.md), whose handout calls it GQA. It is not GQA.

S_i = sum_j Q_ij K_i^T / sqrt(E): the scores of a group are summed before the softmax, so there are K attention
maps, not H, and the output has width K E. The sum distributes over the product, so this is exactly MHA with K heads
whose query weights are the sums of each group's: the additional query weights add parameters but no function. The
homework's grader (autumn 2024) names its result `expected_output_f24_incorrect`. GQA (Ainslie et al., arXiv 2305.13245)
has a softmax for every query head: see grouped.py.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from rehead.attention.base import AttentionConfig, variants
from rehead.attention.grouped import GroupedAttention
from rehead.attention.grouped_config import GroupedConfig, require_divides
from rehead.attention.rope import RopeConfig
from rehead.nn.linear import Linear


@variants.add("gqa_sum")
@dataclass(frozen=True, kw_only=True)
class SummedConfig(AttentionConfig):
    """`n_query_head` query projections of width `head_dim`, summed in groups to `n_kv_head` heads (h_q and h_kv)."""

    n_query_head: int
    n_kv_head: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_query_head", "n_kv_head", "head_dim")
        require_divides(self.n_kv_head, self.n_query_head)
        if self.rope is not None:
            self.require_turns(self.head_dim, "head_dim")

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Return the variant plain, with rope, with a window, and with biases."""
        summed = cls(n_query_head=6, n_kv_head=2, head_dim=10)
        return {
            "gqa_sum": summed,
            "gqa_sum, rope": replace(summed, rope=RopeConfig()),
            "gqa_sum, rope, window": replace(summed, rope=RopeConfig(), window=5, n_kv_head=3),
            "gqa_sum, bias": replace(summed, qkv_bias=True, o_bias=True, n_kv_head=1),
        }

    @property
    def name(self) -> str:
        """Return "gqa_sum"."""
        return "gqa_sum"

    @property
    def n_map(self) -> int:
        """Number of attention maps: one per KV head."""
        return self.n_kv_head

    def describe(self) -> str:
        """Describe the variant with the number of heads before and after the sum."""
        heads = "head" if self.n_kv_head == 1 else "heads"
        summed = f"{self.n_query_head} queries summed to {self.n_kv_head} {heads} of {self.head_dim}"
        return f"gqa_sum, {summed}{self._position()}"

    def equivalent(self) -> GroupedConfig:
        """Return MHA of the KV heads, with the query weights of each group summed."""
        return GroupedConfig(
            d_context=self.d_context,
            causal=self.causal,
            window=self.window,
            rope=self.rope,
            attn_pdrop=self.attn_pdrop,
            n_query_head=self.n_kv_head,
            n_kv_head=self.n_kv_head,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            o_bias=self.o_bias,
        )

    def build(self, d_model: int) -> "SummedAttention":
        """Build the module for activations of width `d_model`."""
        self.require_width(d_model)
        return SummedAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of rotated keys and of values."""
        return {"key": (self.n_kv_head, self.head_dim), "value": (self.n_kv_head, self.head_dim)}

    def n_parameters(self, d_model: int) -> int:
        """Number of parameters: query weights as in GQA, an output projection of the keys' width."""
        queries, heads = self.n_query_head * self.head_dim, self.n_kv_head * self.head_dim
        biases = (queries + 2 * heads) * self.qkv_bias + d_model * self.o_bias
        return self.projection_flops(d_model) // 2 + biases

    def projection_flops(self, d_model: int) -> int:
        """FLOPs of the four products."""
        queries, heads = self.n_query_head * self.head_dim, self.n_kv_head * self.head_dim
        return 2 * (d_model * (queries + heads) + 2 * (self.d_context or d_model) * heads)

    def attention_flops(self, n_key: int) -> int:
        """4 K E FLOPs per visible key, which, unlike GQA's, decrease with the number of KV heads."""
        return 4 * self.n_kv_head * self.head_dim * n_key


class SummedLinear(Linear):
    """A projection to `n_head` groups of heads of `width`, each group summed: (..., D) to (..., n_head * width)."""

    def __init__(self, d_model: int, n_query_head: int, n_head: int, width: int, *, bias: bool) -> None:
        super().__init__(d_model, n_query_head * width, bias=bias)
        self.heads = n_head, n_query_head // n_head, width

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B KE"]:
        """Project, then sum the heads of each group."""
        return super().forward(x).unflatten(-1, self.heads).sum(dim=-2).flatten(-2)


class SummedAttention(GroupedAttention):
    """The equivalent MHA on summed queries; the query heads of a group are adjacent in `q_proj`.

    `weights` are (B, K, L, S), one map for each KV head, since a group has one softmax.
    """

    def __init__(self, config: SummedConfig, d_model: int) -> None:
        sizes = d_model, config.n_query_head, config.n_kv_head, config.head_dim
        super().__init__(config.equivalent(), d_model, SummedLinear(*sizes, bias=config.qkv_bias))

    lower = GroupedAttention.lower
