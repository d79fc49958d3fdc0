"""The sum form of the CMU 10-423 homework's handout, which it calls GQA and which is not.

S_i = sum_j Q_ij K_i^T / sqrt(E): the scores of a group are summed before the softmax, so that there are K maps of
weights, not H, and the output is K E wide. Since the sum goes through the product, this is exactly MHA of K heads whose
query weights are the sums of each group's: the other query weights add parameters and no function. The homework's own
grader (autumn 2024) names its result `expected_output_f24_incorrect`. GQA (Ainslie et al., arXiv 2305.13245) has a
softmax for every query head: see grouped.py.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention import kernels
from rehead.attention.base import Attention, AttentionConfig, variants
from rehead.attention.cache import LayerCache
from rehead.attention.grouped import GroupedConfig, require_divides
from rehead.attention.mask import Mask
from rehead.attention.rope import RopeConfig, Rotary
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
        """Plain, rotated, windowed and biased."""
        summed = cls(n_query_head=6, n_kv_head=2, head_dim=10)
        return {
            "gqa_sum": summed,
            "gqa_sum, rope": replace(summed, rope=RopeConfig()),
            "gqa_sum, rope, window": replace(summed, rope=RopeConfig(), window=5, n_kv_head=3),
            "gqa_sum, bias": replace(summed, qkv_bias=True, o_bias=True, n_kv_head=1),
        }

    @property
    def name(self) -> str:
        """gqa_sum."""
        return "gqa_sum"

    @property
    def n_map(self) -> int:
        """One per KV head."""
        return self.n_kv_head

    def describe(self) -> str:
        """See `AttentionConfig.describe`."""
        heads = "head" if self.n_kv_head == 1 else "heads"
        summed = f"{self.n_query_head} queries summed to {self.n_kv_head} {heads} of {self.head_dim}"
        return f"gqa_sum, {summed}{self._position()}"

    def equivalent(self) -> GroupedConfig:
        """MHA of the KV heads, with the query weights of each group summed."""
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
        """A module for activations of width `d_model`."""
        self.require_width(d_model)
        return SummedAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """Rotated keys, and values."""
        return {"key": (self.n_kv_head, self.head_dim), "value": (self.n_kv_head, self.head_dim)}

    def n_parameters(self, d_model: int) -> int:
        """As many query weights as GQA, an output projection as narrow as the keys."""
        queries, heads = self.n_query_head * self.head_dim, self.n_kv_head * self.head_dim
        biases = (queries + 2 * heads) * self.qkv_bias + d_model * self.o_bias
        return self.projection_flops(d_model) // 2 + biases

    def projection_flops(self, d_model: int) -> int:
        """The four products."""
        queries, heads = self.n_query_head * self.head_dim, self.n_kv_head * self.head_dim
        return 2 * (d_model * (queries + heads) + 2 * (self.d_context or d_model) * heads)

    def attention_flops(self, n_key: int) -> int:
        """4 K E per visible key: unlike GQA's, these fall with the KV heads."""
        return 4 * self.n_kv_head * self.head_dim * n_key


class SummedAttention(Attention):
    """Weights under Hugging Face's names; the query heads of a group lie together in `q_proj`."""

    def __init__(self, config: SummedConfig, d_model: int) -> None:
        super().__init__()
        self.config: SummedConfig = config
        self.d_model = d_model
        queries, heads = config.n_query_head * config.head_dim, config.n_kv_head * config.head_dim
        d_context = config.d_context or d_model
        self.q_proj = Linear(d_model, queries, bias=config.qkv_bias)
        self.k_proj = Linear(d_context, heads, bias=config.qkv_bias)
        self.v_proj = Linear(d_context, heads, bias=config.qkv_bias)
        self.o_proj = Linear(heads, d_model, bias=config.o_bias)
        self.rotary = Rotary(config.rope, config.head_dim) if config.rope else None

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Attention over the tokens of `x` (B, L, D), or over `context` (B, S, C); returns (B, L, D).

        `positions` (B, L) or (1, L): where the tokens stand, -1 for padding; without, they follow those in
        `cache`. `cache` keeps keys and values between calls: `config.cache(B)` makes one. `context_positions`
        (B, S) are for `context`. All tensors are of the weights' dtype. Raises UsageError or InvalidInput for
        what does not fit.
        """
        query, key, value, mask = self._project(x, context, positions, cache, context_positions)
        return self.o_proj(kernels.attend(query, key, value, mask, pdrop=self._pdrop).flatten(2))

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice:
        """See `Attention.choice`."""
        n_key, heads = self._n_key(n_query, n_past), (self.config.n_kv_head, self.config.head_dim)
        query, key = self._stub(batch_size, n_query, *heads), self._stub(batch_size, n_key, *heads)
        mask, scale = self._mask(n_query, n_key, None, None), self.config.head_dim**-0.5
        return kernels.choose(kernels.Call(query, key, key, mask, scale, None, self._pdrop))

    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B K L S"]:
        """See `Attention.weights`: one map for each KV head, since a group has one softmax."""
        query, key, _, mask = self._project(x, context, positions, None, context_positions)
        return kernels.weights(query, key, mask.dense(x.device)).flatten(1, 2)

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        context_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """Summed queries, all keys and values there are to see, and who sees what."""
        self._check(x, context, positions, cache, context_positions)
        config, source, start = self.config, x if context is None else context, 0
        if cache is not None:
            positions, start = cache.next(x.shape[1]) if positions is None else positions, cache.length
        query = self.q_proj(x).unflatten(2, (config.n_kv_head, -1, config.head_dim)).sum(dim=3)
        key, value = (
            projection(source).unflatten(2, (config.n_kv_head, config.head_dim))
            for projection in (self.k_proj, self.v_proj)
        )
        key_positions = positions if context is None else context_positions
        if self.rotary is not None:
            query, key = self.rotary(query, positions, start), self.rotary(key, key_positions, start)
        if cache is not None:
            rows, key_positions = cache.append(positions, key=key, value=value)
            key, value = rows["key"], rows["value"]
        return query, key, value, self._mask(x.shape[1], key.shape[1], positions, key_positions)
