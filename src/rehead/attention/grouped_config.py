"""The config of MHA, GQA and MQA: sizes and costs. The module is in grouped.py."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from rehead.attention.base import FILLED, AttentionConfig, variants
from rehead.attention.rope import RopeConfig
from rehead.attention.score import ScoreConfig, scores
from rehead.errors import ConfigError
from rehead.nn.norm import NormKind

if TYPE_CHECKING:
    from rehead.attention.grouped import GroupedAttention

HeadMap = Literal["contiguous", "modular"]


@variants.add("mha", "gqa", "mqa")
@dataclass(frozen=True, kw_only=True)
class GroupedConfig(AttentionConfig):
    """`n_kv_head` equal to `n_query_head` is MHA (the default), 1 is MQA, anything between is GQA.

    `head_map` is the KV head that query head h reads: h // (H/K) (contiguous, as in Hugging Face) or
    h % K (modular). `v_head_dim` defaults to `head_dim`. `score` is a name or a `ScoreConfig`.
    `qkv_bias` and `o_bias` add biases to the projections. With `tie_kv` the keys are also the
    values: there is no `v_proj`, and the cache stores them once (the reduced form of MLA).
    `qk_norm_eps` applies a norm of that eps to each query and key head before the rotation (Qwen3's):
    `qk_norm` is its kind (Gemma 3's is zero-centered), and with `qk_norm_over` projection it is one over
    all heads together (OLMo2).
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
    qk_norm: NormKind = "rmsnorm"
    qk_norm_over: Literal["head", "projection"] = "head"

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
        self.require_eps(self.qk_norm_eps)
        if self.qk_norm_eps is None and (self.qk_norm, self.qk_norm_over) != ("rmsnorm", "head"):
            raise ConfigError(
                f"qk_norm={self.qk_norm} over a {self.qk_norm_over} without qk_norm_eps, the eps of that norm. Use "
                "qk_norm_eps=1e-6, or leave both out."
            )
        if self.tie_kv and (self.rope is not None or self.v_head_dim != self.head_dim):
            raise ConfigError(
                f"tie_kv=True with head_dim={self.head_dim}, v_head_dim={self.v_head_dim} and "
                f"rope={self.rope is not None}: keys that are also the values have their width and no rotation. Use "
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
            "gqa, normed as a whole": replace(gqa, qk_norm_eps=1e-6, qk_norm_over="projection"),
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

    @property
    def scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5 if self.score.scale is None else self.score.scale

    @property
    def relative_scale(self) -> float:
        """`scale` in units of 1 / sqrt(E), exactly 1 by default."""
        return 1.0 if self.score.scale is None else self.score.scale * self.head_dim**0.5

    def build(self, d_model: int) -> "GroupedAttention":
        """Build the module for activations of width `d_model`."""
        from rehead.attention.grouped import GroupedAttention

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
        whole, kind = self.qk_norm_over == "projection", 2 if self.qk_norm == "layernorm" else 1
        norms = 0 if self.qk_norm_eps is None else kind * (q + k if whole else 2 * self.head_dim)
        return weight + bias + norms + self.score.n_parameters(self.n_query_head, self.head_dim)

    def projection_flops(self, d_model: int) -> int:
        """FLOPs of the four products, and of a learned score's part that is computed once per token."""
        q, k, v, o = self._widths()
        products = 2 * (d_model * (q + o) + (self.d_context or d_model) * (k + v))
        return products + self.score.token_flops(self.n_query_head, self.head_dim)

    def attention_flops(self, n_key: int) -> int:
        """2 H (E + V) FLOPs per visible key for any number of KV heads; a learned score replaces 2 E."""
        return self.n_query_head * (self.score.pair_flops(self.head_dim) + 2 * self.v_head_dim) * n_key

    def decode_flops(self, d_model: int, n_key: int) -> int:
        """FLOPs of one decoded token; a learned score's part of every cached key is computed again."""
        again = self.score.key_flops(self.n_query_head, self.head_dim) * (n_key - 1)
        return super().decode_flops(d_model, n_key) + again

    def _widths(self) -> tuple[int, int, int, int]:
        """Widths of queries, keys, values and the input of the output projection."""
        return (
            self.n_query_head * self.head_dim,
            self.n_kv_head * self.head_dim,
            self.n_kv_head * self.v_head_dim * (not self.tie_kv),
            self.n_query_head * self.v_head_dim,
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` up to 4096. A message lists the first 20."""
    return [n for n in range(1, min(number, 4096) + 1) if number % n == 0]


def require_divides(n_kv_head: int, n_query_head: int) -> None:
    """Refuse a number of KV heads that does not divide the number of query heads."""
    if n_query_head % n_kv_head:
        raise ConfigError(
            f"n_kv_head={n_kv_head} does not divide n_query_head={n_query_head}: "
            f"every KV head serves equally many query heads. Use one of {divisors(n_query_head)[:20]}."
        )
