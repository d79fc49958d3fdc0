"""Multi-head, grouped-query and multi-query attention: one mechanism under three names.

MHA (Vaswani et al., 2017) has a key and value head for every query head, MQA (Shazeer, 2019) one for
all, GQA (Ainslie et al., arXiv 2305.13245) anything between.
"""

from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels
from rehead.attention.base import FILLED, Attention, AttentionConfig, variants
from rehead.attention.cache import LayerCache
from rehead.attention.mask import Mask
from rehead.attention.program import Attend, Norm, Program, Rotate, Slot, Store
from rehead.attention.rope import RopeConfig, Rotary
from rehead.attention.score import ScoreConfig, scores
from rehead.errors import ConfigError
from rehead.nn.linear import Linear

HeadMap = Literal["contiguous", "modular"]


@variants.add("mha", "gqa", "mqa")
@dataclass(frozen=True, kw_only=True)
class GroupedConfig(AttentionConfig):
    """`n_kv_head` equal to `n_query_head` is MHA (the default), 1 is MQA, anything between is GQA.

    `head_map` is the KV head that query head h reads: h // (H/K) (contiguous, as in Hugging Face) or
    h % K (modular). `v_head_dim` defaults to `head_dim`. `score` is a name or a `ScoreConfig`.
    `qkv_bias` and `o_bias` add biases to the projections. With `tie_kv` the keys are also the
    values: there is no `v_proj`, and the cache stores them once (the reduced form of MLA).
    `qk_norm_eps` applies an RMSNorm of that eps to each query and key head before the rotation
    (Qwen3's).
    """

    n_query_head: int
    head_dim: int
    n_kv_head: int = FILLED
    v_head_dim: int = FILLED
    head_map: HeadMap = "contiguous"
    score: ScoreConfig = FILLED
    qkv_bias: bool = False
    o_bias: bool = False
    tie_kv: bool = False
    qk_norm_eps: float | None = None

    def __post_init__(self) -> None:
        if self.n_kv_head is None:
            self.fill(n_kv_head=self.n_query_head)
        if self.v_head_dim is None:
            self.fill(v_head_dim=self.head_dim)
        if self.score is None or isinstance(self.score, str):
            self.fill(score=scores[self.score or "scaled_dot"]())
        super().__post_init__()
        self.require_positive("n_query_head", "n_kv_head", "head_dim", "v_head_dim")
        require_divides(self.n_kv_head, self.n_query_head)
        if self.rope is not None:
            self.require_turns(self.head_dim, "head_dim")
        if self.qk_norm_eps is not None and not 0 < self.qk_norm_eps < 1:
            raise ConfigError(f"qk_norm_eps={self.qk_norm_eps}: a small positive number. Use 1e-6, or None.")
        if self.tie_kv and (self.rope is not None or self.v_head_dim != self.head_dim):
            raise ConfigError(
                f"tie_kv=True with head_dim={self.head_dim}, v_head_dim={self.v_head_dim} and "
                f"rope={self.rope is not None}: keys that are values too are as wide and are not rotated. Use "
                f"v_head_dim={self.head_dim} and rope=False, or tie_kv=False."
            )

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Return MHA, GQA and MQA with and without rope, window, modular heads, biases, tied values, each score."""
        gqa = cls(n_query_head=6, n_kv_head=2, head_dim=10, v_head_dim=7)
        return {
            "mha": replace(gqa, n_kv_head=6),
            "gqa": gqa,
            "mqa": replace(gqa, n_kv_head=1),
            "gqa, rope": replace(gqa, rope=RopeConfig()),
            "gqa, partial rope": replace(gqa, rope=RopeConfig(partial_rotary_factor=0.4)),
            "gqa, window": replace(gqa, window=5),
            "gqa, rope, window": replace(gqa, rope=RopeConfig(), window=5),
            "gqa, modular, bias": replace(gqa, head_map="modular", qkv_bias=True, o_bias=True),
            "gqa, rope, normed": replace(gqa, rope=RopeConfig(), qk_norm_eps=1e-6),
            "mqa, tied, window": replace(gqa, n_kv_head=1, v_head_dim=10, tie_kv=True, window=5),
            **{f"gqa, {score}": replace(gqa, score=scores[score]()) for score in scores},
        }

    @property
    def name(self) -> str:
        """Return mha, gqa or mqa."""
        if self.n_kv_head == self.n_query_head:
            return "mha"
        return "mqa" if self.n_kv_head == 1 else "gqa"

    def describe(self) -> str:
        """Describe the variant with its KV heads, such as `gqa, 2 KV heads of 64, rope`."""
        heads = "head" if self.n_kv_head == 1 else "heads"
        text = f"{self.name}, {self.n_kv_head} KV {heads} of {self.head_dim}"
        text += ", tied" if self.tie_kv else ""
        text += ", modular" if self.head_map == "modular" else ""
        return text + self._position()

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.n_query_head // self.n_kv_head

    def build(self, d_model: int) -> "GroupedAttention":
        """Build the module for activations of width `d_model`."""
        self.require_width(d_model)
        return GroupedAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """Rows of rotated keys and of values; only keys with `tie_kv`."""
        key, value = (self.n_kv_head, self.head_dim), (self.n_kv_head, self.v_head_dim)
        return {"key": key} if self.tie_kv else {"key": key, "value": value}

    def n_parameters(self, d_model: int) -> int:
        """Number of parameters: projections, biases, norms, and those of a learned score."""
        q, k, v, o = self._widths()
        bias = (q + k + v) * self.qkv_bias + d_model * self.o_bias
        weight = d_model * (q + o) + (self.d_context or d_model) * (k + v)
        norms = 0 if self.qk_norm_eps is None else 2 * self.head_dim
        return weight + bias + norms + self.score.n_parameters(self.n_query_head, self.head_dim)

    def projection_flops(self, d_model: int) -> int:
        """FLOPs of the four products, and of a learned score's part that is computed once per token."""
        q, k, v, o = self._widths()
        products = 2 * (d_model * (q + o) + (self.d_context or d_model) * (k + v))
        return products + self.score.token_flops(self.n_query_head, self.head_dim)

    def attention_flops(self, n_key: int) -> int:
        """2 H (E + V) FLOPs per visible key for any number of KV heads; a learned score replaces 2 E."""
        return self.n_query_head * (self.score.pair_flops(self.head_dim) + 2 * self.v_head_dim) * n_key

    def _widths(self) -> tuple[int, int, int, int]:
        """Widths of queries, keys, values and the input of the output projection."""
        return (
            self.n_query_head * self.head_dim,
            self.n_kv_head * self.head_dim,
            self.n_kv_head * self.v_head_dim * (not self.tie_kv),
            self.n_query_head * self.v_head_dim,
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` to list in a message: the first 20, none above 4096."""
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0][:20]


def require_divides(n_kv_head: int, n_query_head: int) -> None:
    """Refuse a number of KV heads that does not divide the number of query heads."""
    if n_query_head % n_kv_head:
        raise ConfigError(
            f"n_kv_head={n_kv_head} does not divide n_query_head={n_query_head}: "
            f"every KV head serves equally many query heads. Use one of {divisors(n_query_head)}."
        )


class GroupedAttention(Attention):
    """MHA, GQA or MQA. Weights have Hugging Face's names; heads are stacked along the rows of each projection.

    `q_proj` replaces the projection of the queries.
    """

    def __init__(self, config: GroupedConfig, d_model: int, q_proj: Linear | None = None) -> None:
        super().__init__()
        self.config: GroupedConfig = config
        self.d_model = d_model
        q, k, v, o = config._widths()
        d_context = config.d_context or d_model
        self.q_proj = q_proj or Linear(d_model, q, bias=config.qkv_bias)
        self.k_proj = Linear(d_context, k, bias=config.qkv_bias)
        self.v_proj = None if config.tie_kv else Linear(d_context, v, bias=config.qkv_bias)
        self.o_proj = Linear(o, d_model, bias=config.o_bias)
        norm, eps = config.qk_norm_eps is not None, config.qk_norm_eps
        self.q_norm = nn.RMSNorm(config.head_dim, eps=eps) if norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=eps) if norm else None
        self.score = config.score.build(config.n_kv_head, config.group, config.head_dim)
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

        `positions` (B, L) or (1, L) are those of the tokens, -1 for padding; by default they follow those in
        `cache`. `cache` keeps keys and values between calls; `config.cache(B)` creates one. `context_positions`
        (B, S) are for `context`. All tensors have the weights' dtype. Raises UsageError or InvalidInput for
        invalid arguments.
        """
        query, key, value, mask = self._project(x, context, positions, cache, context_positions)
        scale = self.config.head_dim**-0.5
        gathered = kernels.attend(query, key, value, mask, scale=scale, score=self.score, pdrop=self._pdrop)
        return self.o_proj(self._from_slots(gathered).flatten(2))

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice:
        """Return the kernel that `forward` would use."""
        config, n_key = self.config, self._n_key(n_query, n_past)
        call = kernels.Call(
            self._stub(batch_size, n_query, config.n_query_head, config.head_dim),
            self._stub(batch_size, n_key, config.n_kv_head, config.head_dim),
            self._stub(batch_size, n_key, config.n_kv_head, config.v_head_dim),
            self._mask(n_query, n_key, None, None),
            config.head_dim**-0.5,
            self.score,
            self._pdrop,
        )
        return kernels.choose(call)

    def one_token(self) -> str:
        """Describe how one token is decoded."""
        if self.score is not None:
            return "slow, a learned score has only the reference kernel"
        return "two products per KV head, its group of query heads folded into the rows; keys are read once"

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token; with a learned score, a call of `forward`."""
        if self.score is not None:
            return super().lower(program, x, layer)
        config = self.config
        H, K, E, V = config.n_query_head, config.n_kv_head, config.head_dim, config.v_head_dim
        to_value = [] if self.v_proj is None else [(self.v_proj, K * V)]
        query, key, *values = program.linear(x, (self.q_proj, H * E), (self.k_proj, K * E), *to_value)
        query, key = query.split(H), key.split(K)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = program.add(Norm(query, self.q_norm)), program.add(Norm(key, self.k_norm))
        if self.rotary is not None:
            heads = program.add(Rotate((query, key), self.rotary))
            query, key = heads.head(0, H), heads.head(H, K)
        rows: dict[str, tuple[Slot, ...]] = {"key": (key,)}
        for value in values:
            rows["value"] = (value.split(K),)
        program.add(Store(layer, rows))
        is_modular = config.head_map == "modular"
        gathered = program.add(Attend(layer, (query,), "key", list(rows)[-1], K, V, E**-0.5, is_modular))
        (output,) = program.linear(gathered.flat(), (self.o_proj, self.d_model))
        return output

    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """Return the attention weights of one pass, with the query heads in the order of `q_proj`."""
        query, key, _, mask = self._project(x, context, positions, None, context_positions)
        weights = kernels.weights(query, key, mask.dense(x.device), score=self.score)  # B K G L S
        if self.config.head_map == "modular":
            weights = weights.transpose(1, 2)
        return weights.flatten(1, 2)

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        context_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """Queries, all keys and values that may be visible, and the mask."""
        self._check(x, context, positions, cache, context_positions)
        config, source = self.config, x if context is None else context
        start = 0
        if cache is not None:
            positions, start = cache.next(x.shape[1]) if positions is None else positions, cache.length
        query = self._to_slots(self.q_proj(x).unflatten(2, (config.n_query_head, config.head_dim)))
        rows = {"key": self.k_proj(source).unflatten(2, (config.n_kv_head, config.head_dim))}
        if self.v_proj is not None:
            rows["value"] = self.v_proj(source).unflatten(2, (config.n_kv_head, config.v_head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            query, rows["key"] = self.q_norm(query), self.k_norm(rows["key"])
        key_positions = positions if context is None else context_positions
        if self.rotary is not None:
            query = self.rotary(query, positions, start)
            rows["key"] = self.rotary(rows["key"], key_positions, start)
        if cache is not None:
            rows, key_positions = cache.append(positions, **rows)
        key, value = rows["key"], rows["key" if config.tie_kv else "value"]
        return query, key, value, self._mask(x.shape[1], key.shape[1], positions, key_positions)

    def _to_slots(self, query: Float[Tensor, "B L H E"]) -> Float[Tensor, "B L H E"]:
        """Reorder query heads by the KV head they read: 0, 3, 6, 9, 1, 4, ... for modular, K = 3."""
        if self.config.head_map == "contiguous":
            return query
        return query.unflatten(2, (-1, self.config.n_kv_head)).transpose(2, 3).flatten(2, 3)

    def _from_slots(self, gathered: Float[Tensor, "B L H V"]) -> Float[Tensor, "B L H V"]:
        """Undo `_to_slots`: restore the order of the rows of `q_proj` and the columns of `o_proj`."""
        if self.config.head_map == "contiguous":
            return gathered
        return gathered.unflatten(2, (self.config.n_kv_head, -1)).transpose(2, 3).flatten(2, 3)
