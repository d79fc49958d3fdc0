"""The config of multi-head latent attention: sizes and costs. The module is in latent.py."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rehead.attention.base import FILLED, AttentionConfig, variants
from rehead.attention.grouped_config import require_divides
from rehead.attention.rope import RopeConfig
from rehead.errors import ConfigError

if TYPE_CHECKING:
    from rehead.attention.latent import LatentAttention


MOST_SCALED, MOST_REBUILT = 16.0, 64.0
"""Numbers of new tokens from which the expanded form is used where the absorbed one holds all scores in memory: where
each key has a scale, and where keys are rebuilt."""


@variants.add("mla")
@dataclass(frozen=True, kw_only=True)
class LatentConfig(AttentionConfig):
    """Field names are DeepSeek's, as in Hugging Face.

    There are three forms of position. `qk_rope_head_dim` > 0: a decoupled part of that width,
    rotated and shared by all heads (DeepSeek's). 0 with `rope`: keys are rebuilt from the
    cached latent and rotated as a whole, so any rotary model can be represented, at the cost of rebuilding
    all keys at every step. 0 without `rope`: no position.

    `latent_norm` applies an RMSNorm to the latent (`kv_a_layernorm`); `q_lora_rank` gives the queries
    a latent of their own. The latent expands to `n_kv_head` heads, by default one per query head.
    `qkv_bias` adds biases to the queries and to the expanded keys and values; `down_bias` to the projections to
    latents and to the rotary part, `q_a_proj` and `kv_a_proj_with_mqa`. `attention_bias` in DeepSeek's classes is
    `down_bias` and `o_bias`.

    `qk_norm_eps` applies an RMSNorm with that eps to each query and key head, before any rotation (Qwen3's).
    Decoding need not rebuild keys for it: the cache keeps the 1 / RMS of each KV head's key beside the latent, and
    scores are multiplied by it. A rotary part is shared by all heads, so with one, separate heads are normed,
    `qk_norm_head_dim` wide: a query is a matrix (`q_up_proj`) times its normed head, and the RMS of a key is that of
    the output of `k_scale_proj`.
    """

    n_query_head: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    qk_rope_head_dim: int = 0
    q_lora_rank: int | None = None
    n_kv_head: int = FILLED
    latent_norm: bool = True
    qk_norm_eps: float | None = None
    qk_norm_head_dim: int | None = None
    qkv_bias: bool = False
    down_bias: bool = False
    o_bias: bool = False

    def __post_init__(self) -> None:
        if self.rope is None and self.qk_rope_head_dim:
            self.fill(rope=RopeConfig())
        if self.n_kv_head is None:
            self.fill(n_kv_head=self.n_query_head)
        super().__post_init__()
        self.require_positive("n_query_head", "n_kv_head", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        require_divides(self.n_kv_head, self.n_query_head)
        if self.q_lora_rank is not None:
            self.require_positive("q_lora_rank")
        self.require_eps(self.qk_norm_eps)
        if self.qk_rope_head_dim:
            self.require_positive("qk_rope_head_dim")
            if self.rope is None:
                raise ConfigError(
                    f"qk_rope_head_dim={self.qk_rope_head_dim} with rope=False: that part of the keys exists "
                    "to be rotated. Use rope=True, or qk_rope_head_dim=0."
                )
            if self.rope.partial_rotary_factor != 1:
                raise ConfigError(
                    f"partial_rotary_factor={self.rope.partial_rotary_factor} with qk_rope_head_dim="
                    f"{self.qk_rope_head_dim}: all of that part rotates. Use 1, and a smaller qk_rope_head_dim."
                )
            self.require_turns(self.qk_rope_head_dim, "qk_rope_head_dim")
        elif self.rope is not None:
            self.require_turns(self.qk_nope_head_dim, "qk_nope_head_dim")
        if self.qk_norm_head_dim is not None:
            self.require_positive("qk_norm_head_dim")
        if (self.qk_norm_head_dim is not None) != bool(self.qk_rope_head_dim and self.qk_norm_eps):
            raise ConfigError(
                f"qk_norm_head_dim={self.qk_norm_head_dim} with qk_rope_head_dim={self.qk_rope_head_dim} and "
                f"qk_norm_eps={self.qk_norm_eps}: it is the width of the normed heads beside a rotary part. Give all "
                "three; without it, at most one of the others."
            )

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Return each form of position, with and without norm, window, query latent and shared heads."""
        mla = cls(
            n_query_head=6,
            kv_lora_rank=9,
            qk_nope_head_dim=10,
            qk_rope_head_dim=4,
            v_head_dim=7,
            q_lora_rank=11,
        )
        biased = replace(mla, n_kv_head=2, qkv_bias=True, down_bias=True, o_bias=True)
        plain = replace(mla, qk_rope_head_dim=0, rope=None, q_lora_rank=None)
        return {
            "mla": mla,
            "mla, window": replace(mla, window=5),
            "mla, bias": biased,
            "mla, bias, no query latent": replace(biased, q_lora_rank=None),
            "mla, rebuilt keys": replace(plain, rope=RopeConfig(), n_kv_head=2, latent_norm=False),
            "mla, rebuilt keys, window": replace(plain, rope=RopeConfig(), window=5),
            "mla, rebuilt keys, normed": replace(plain, rope=RopeConfig(), n_kv_head=2, qk_norm_eps=1e-6),
            "mla, no position, normed": replace(plain, n_kv_head=3, latent_norm=False, qk_norm_eps=1e-6),
            "mla, no position, no norm, bias": replace(plain, latent_norm=False, qkv_bias=True, o_bias=True),
            "mla, normed": replace(mla, n_kv_head=3, q_lora_rank=None, qk_norm_eps=1e-6, qk_norm_head_dim=8),
            "mla, normed, window": replace(mla, qk_norm_eps=1e-6, qk_norm_head_dim=8, o_bias=True, window=5),
        }

    @property
    def name(self) -> str:
        """Return "mla"."""
        return "mla"

    def describe(self) -> str:
        """Describe the variant with its rank, such as `mla, rank 512 + 64 rotated, rope`."""
        text = f"mla, rank {self.kv_lora_rank}"
        text += f" + {self.qk_rope_head_dim} rotated" if self.qk_rope_head_dim else ""
        text += f" + {self.n_key_scale} norms" if self.n_key_scale else ""
        text += ", rebuilt keys" if self.rebuilds_keys else ""
        return text + self._position()

    @property
    def rebuilds_keys(self) -> bool:
        """True if whole keys are rotated, so that they must be rebuilt before use."""
        return self.rope is not None and not self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        """Factor of the scores, with that of a scaled rope if only a part of the key is rotated."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale * self.rope.score_scale if self.rope and self.qk_rope_head_dim else scale

    @property
    def n_key_scale(self) -> int:
        """Number of key scales (1 / RMS) at the end of a cache row: one per KV head, or 0 without them."""
        return 0 if self.qk_norm_eps is None or self.rebuilds_keys else self.n_kv_head

    @property
    def absorbs_below(self) -> float:
        """Number of new queries below which the absorbed form has fewer FLOPs than the expanded one.

        If keys are rebuilt, only values can be absorbed. If they are, or each key has a scale, the absorbed form holds
        all scores in memory, and a long prompt is expanded whatever the FLOPs.
        """
        heads = self.n_kv_head / self.n_query_head
        absorbed = self.v_head_dim + (0 if self.rebuilds_keys else self.qk_nope_head_dim)
        more = self.kv_lora_rank * (1 if self.rebuilds_keys else 2) - absorbed
        most = float("inf") if more <= 0 else self.kv_lora_rank * heads * absorbed / more
        if self.rebuilds_keys:
            return min(most, MOST_REBUILT)
        return min(most, MOST_SCALED) if self.n_key_scale else most

    def build(self, d_model: int) -> "LatentAttention":
        """Build the module for activations of width `d_model`."""
        from rehead.attention.latent import LatentAttention

        return LatentAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """One row: the normed latent, the rotated key part that all heads share, and 1 / RMS of normed keys."""
        return {"latent": (self.kv_lora_rank + self.qk_rope_head_dim + self.n_key_scale,)}

    def n_parameters(self, d_model: int) -> int:
        """Number of parameters: projections, biases and norms."""
        down, up, _, query = self._widths()
        norms = self.kv_lora_rank * self.latent_norm + (self.q_lora_rank or 0)
        norms += 0 if self.qk_norm_eps is None else self.qk_norm_head_dim or 2 * self.qk_nope_head_dim
        biases = (query + up + self._scaling()) * self.qkv_bias + d_model * self.o_bias
        biases += (down + (self.q_lora_rank or 0)) * self.down_bias
        return self.projection_flops(d_model) // 2 + norms + biases

    def projection_flops(self, d_model: int) -> int:
        """FLOPs of queries, latent, norms of keys, one expansion per token, and output."""
        down, up, o, query = self._widths()
        d_source = self.d_context or d_model
        if self.q_lora_rank is None:
            queries = d_model * query
        else:
            queries = (d_model + query) * self.q_lora_rank
        if self.qk_norm_head_dim is not None:
            queries += query * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        return 2 * (queries + d_source * (down + self._scaling()) + self.kv_lora_rank * up + o * d_model)

    def attention_flops(self, n_key: int) -> int:
        """FLOPs of the expanded form: 2 H (E + V) per visible key, E including the rotary part."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        return 2 * self.n_query_head * width * n_key

    def decode_flops(self, d_model: int, n_key: int) -> int:
        """FLOPs of one decoded token. Absorbed, a key costs R instead of E and V; rebuilt keys are recomputed."""
        _, up, _, _ = self._widths()
        projections = self.projection_flops(d_model) - 2 * self.kv_lora_rank * up
        if self.absorbs_below <= 1:
            return projections + 2 * self.kv_lora_rank * up * n_key + self.attention_flops(n_key)
        absorbing = self.n_query_head * self.kv_lora_rank * self.v_head_dim
        per_key = self.n_query_head * (self.kv_lora_rank + self.qk_rope_head_dim)
        if self.rebuilds_keys:
            per_key += (self.kv_lora_rank * self.n_kv_head + self.n_query_head) * self.qk_nope_head_dim
        else:
            rebuilt = 0 if self.qk_norm_head_dim else self.n_key_scale  # for their norms, of the new token
            absorbing += (self.n_query_head + rebuilt) * self.kv_lora_rank * self.qk_nope_head_dim
            per_key += self.n_query_head * self.kv_lora_rank
        return projections + 2 * (absorbing + per_key * n_key)

    def _scaling(self) -> int:
        """Output width of `k_scale_proj`, whose heads are used only for their RMS; 0 without it."""
        return self.n_kv_head * (self.qk_norm_head_dim or 0)

    def _widths(self) -> tuple[int, int, int, int]:
        """Widths of the down projection, the expansion, the input of the output projection, and the queries."""
        query = self.qk_norm_head_dim or self.qk_nope_head_dim + self.qk_rope_head_dim
        return (
            self.kv_lora_rank + self.qk_rope_head_dim,
            self.n_kv_head * (self.qk_nope_head_dim + self.v_head_dim),
            self.n_query_head * self.v_head_dim,
            self.n_query_head * query,
        )
