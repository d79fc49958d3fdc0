"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values rebuilt from one latent.

Seeds A9, A14, A15. A token leaves R numbers, its latent, and with a decoupled rotary part P more.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels
from rehead.attention.base import FILLED, Attention, AttentionConfig, variants
from rehead.attention.cache import LayerCache
from rehead.attention.grouped import require_divides
from rehead.attention.mask import Mask
from rehead.attention.rope import RopeConfig, Rotary
from rehead.errors import ConfigError

NORM_EPS = 1e-6
"""Of the latent norms, as in DeepSeek's classes in transformers, whatever the model's own is."""


@variants.add("mla")
@dataclass(frozen=True, kw_only=True)
class LatentConfig(AttentionConfig):
    """Field names are DeepSeek's, as in Hugging Face.

    Position comes in one of three ways. `qk_rope_head_dim` > 0: a decoupled part of that width,
    rotated and shared by all heads (DeepSeek's; the default). 0 with `rope`: keys are rebuilt from the
    cached latent and then rotated, whole, so any rotary model fits, at the price of rebuilding them
    at every step. 0 without `rope`: none.

    `latent_norm` says whether an RMSNorm stands on the latent (`kv_a_layernorm`); `q_lora_rank` puts
    the queries through a latent of their own. The latent expands to `n_kv_head` heads, one per query
    head unless given. `qkv_bias` adds biases to the queries and to the expanded keys and values.
    """

    n_query_head: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    qk_rope_head_dim: int = 0
    q_lora_rank: int | None = None
    n_kv_head: int = FILLED
    latent_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False

    def __post_init__(self) -> None:
        if self.rope is None and self.qk_rope_head_dim:
            self.fill(rope=RopeConfig())
        super().__post_init__()
        if self.n_kv_head is None:
            self.fill(n_kv_head=self.n_query_head)
        self.require_positive("n_query_head", "n_kv_head", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")
        require_divides(self.n_kv_head, self.n_query_head)
        if self.q_lora_rank is not None:
            self.require_positive("q_lora_rank")
        if self.qk_rope_head_dim:
            self.require_positive("qk_rope_head_dim")
            if self.rope is None:
                raise ConfigError(
                    f"qk_rope_head_dim={self.qk_rope_head_dim} with rope=False: that part of the keys exists "
                    "to be rotated. Use rope=True, or qk_rope_head_dim=0."
                )
            self.require_turns(self.qk_rope_head_dim, "qk_rope_head_dim")
        elif self.rope is not None:
            self.require_turns(self.qk_nope_head_dim, "qk_nope_head_dim")

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Each way of position, with and without norm, window, query latent and shared heads."""
        mla = cls(
            n_query_head=6,
            kv_lora_rank=9,
            qk_nope_head_dim=10,
            qk_rope_head_dim=4,
            v_head_dim=7,
            q_lora_rank=11,
        )
        plain = replace(mla, qk_rope_head_dim=0, rope=None, q_lora_rank=None)
        return {
            "mla": mla,
            "mla, window": replace(mla, window=5),
            "mla, rebuilt keys": replace(plain, rope=RopeConfig(), n_kv_head=2, latent_norm=False),
            "mla, rebuilt keys, window": replace(plain, rope=RopeConfig(), window=5),
            "mla, no position, no norm, bias": replace(plain, latent_norm=False, qkv_bias=True, o_bias=True),
        }

    @property
    def name(self) -> str:
        """mla."""
        return "mla"

    @property
    def rebuilds_keys(self) -> bool:
        """True where whole keys are rotated, so that they must be rebuilt before they are read."""
        return self.rope is not None and not self.qk_rope_head_dim

    @property
    def absorbs_below(self) -> float:
        """Up to how many new queries the absorbed form has fewer FLOPs than the expanded one."""
        heads = self.n_kv_head / self.n_query_head
        both = self.qk_nope_head_dim + self.v_head_dim
        more = 2 * self.kv_lora_rank - both
        return float("inf") if more <= 0 else self.kv_lora_rank * heads * both / more

    def build(self, d_model: int) -> "LatentAttention":
        """A module for activations of width `d_model`."""
        return LatentAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """The normed latent and, after it, the rotated key part all heads share."""
        return {"latent": (self.kv_lora_rank + self.qk_rope_head_dim,)}

    def n_parameters(self, d_model: int) -> int:
        """Projections, biases and latent norms."""
        _, up, _, query = self._widths()
        norms = self.kv_lora_rank * self.latent_norm + (self.q_lora_rank or 0)
        biases = (query + up) * self.qkv_bias + d_model * self.o_bias
        return self.projection_flops(d_model) // 2 + norms + biases

    def projection_flops(self, d_model: int) -> int:
        """Queries, latent, expansion of each token once, and output."""
        down, up, o, query = self._widths()
        if self.q_lora_rank is None:
            queries = d_model * query
        else:
            queries = (d_model + query) * self.q_lora_rank
        return 2 * (queries + (self.d_context or d_model) * down + self.kv_lora_rank * up + o * d_model)

    def attention_flops(self, n_key: int) -> int:
        """Expanded: 2 H (E + V) per visible key, E with the rotary part."""
        width = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        return 2 * self.n_query_head * width * n_key

    def decode_flops(self, d_model: int, n_key: int) -> int:
        """Absorbed: R instead of E and V per key, and the expansion once. Rebuilt keys: of all keys."""
        _, up, _, _ = self._widths()
        projections = self.projection_flops(d_model) - 2 * self.kv_lora_rank * up
        if self.rebuilds_keys or self.absorbs_below <= 1:
            return projections + 2 * self.kv_lora_rank * up * n_key + self.attention_flops(n_key)
        absorbing = self.n_query_head * self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        per_key = self.n_query_head * (2 * self.kv_lora_rank + self.qk_rope_head_dim)
        return projections + 2 * (absorbing + per_key * n_key)

    def _widths(self) -> tuple[int, int, int, int]:
        """Of what goes down, comes up, enters the output projection, and of the queries."""
        return (
            self.kv_lora_rank + self.qk_rope_head_dim,
            self.n_kv_head * (self.qk_nope_head_dim + self.v_head_dim),
            self.n_query_head * self.v_head_dim,
            self.n_query_head * (self.qk_nope_head_dim + self.qk_rope_head_dim),
        )


class LatentAttention(Attention):
    """Weights under DeepSeek's names; each head's rows of `kv_b_proj` are its keys', then its values'."""

    def __init__(self, config: LatentConfig, d_model: int) -> None:
        super().__init__()
        self.config: LatentConfig = config
        down, up, o, query = config._widths()
        self.scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        if config.qk_rope_head_dim and config.rope is not None and config.rope.scaling is not None:
            self.scale *= config.rope.scaling.score_scale
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(d_model, query, bias=config.qkv_bias)
        else:
            self.q_a_proj = nn.Linear(d_model, config.q_lora_rank, bias=False)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=config.qkv_bias)
        self.kv_a_proj_with_mqa = nn.Linear(config.d_context or d_model, down, bias=False)
        self.kv_a_layernorm = (
            nn.RMSNorm(config.kv_lora_rank, eps=NORM_EPS) if config.latent_norm else nn.Identity()
        )
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, up, bias=config.qkv_bias)
        self.o_proj = nn.Linear(o, d_model, bias=config.o_bias)
        turned = config.qk_rope_head_dim or config.qk_nope_head_dim
        self.rotary = Rotary(config.rope, turned) if config.rope else None

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """See `Attention.forward`."""
        query, latent, key_positions, mask = self._project(x, context, positions, cache, context_positions)
        few = cache is not None and x.shape[1] < self.config.absorbs_below
        if few and not self.config.rebuilds_keys:
            gathered = self.absorbed(query, latent, mask)
        else:
            gathered = self.expanded(query, latent, mask, key_positions)
        return self.o_proj(gathered.flatten(2))

    def expanded(
        self,
        query: Float[Tensor, "B L H E"],
        latent: Float[Tensor, "B S RP"],
        mask: Mask,
        key_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L H V"]:
        """Rebuild keys and values per head from the latents, then attend as in MHA (A14)."""
        key, value = self._expand(latent, key_positions)
        return kernels.attend(query, key, value, mask, scale=self.scale, pdrop=self._pdrop)

    def absorbed(
        self, query: Float[Tensor, "B L H E"], latent: Float[Tensor, "B S RP"], mask: Mask
    ) -> Float[Tensor, "B L H V"]:
        """Move the expansion to the query's side: MQA whose one KV head is the latent (A15).

        A bias of the keys adds one number to all of a query's scores, which the softmax ignores.
        """
        config = self.config
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        key_up, value_up = self._ups()  # K N R, K V R
        grouped = nope.unflatten(2, (config.n_kv_head, -1))
        query = torch.cat([torch.einsum("blkgn,knr->blkgr", grouped, key_up).flatten(2, 3), rope], dim=-1)
        key = latent[:, :, None]
        value = key[..., : config.kv_lora_rank]
        context = kernels.attend(query, key, value, mask, scale=self.scale, pdrop=self._pdrop)
        context = context.unflatten(2, (config.n_kv_head, -1))
        values = torch.einsum("blkgr,kvr->blkgv", context, value_up)
        if self.kv_b_proj.bias is not None:  # the weights sum to 1, or to 0 where nothing is seen
            bias, dense = self._per_head(self.kv_b_proj.bias)[1][:, None], mask.dense(values.device)
            values = values + (bias if dense is None else bias * dense.any(dim=-1)[:, :, None, None, None])
        return values.flatten(2, 3)

    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """See `Attention.weights`."""
        query, latent, key_positions, mask = self._project(x, context, positions, None, context_positions)
        key, _ = self._expand(latent, key_positions)
        return kernels.weights(query, key, mask.dense(x.device), scale=self.scale).flatten(1, 2)

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        context_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Mask]:
        """Rotated queries, all latents there are to see, where these stand, and who sees what."""
        self._check(x, context, cache)
        start = 0
        if cache is not None:
            positions, start = cache.next(x.shape[1]) if positions is None else positions, cache.length
        query = self._queries(x, positions, start)
        key_positions = positions if context is None else context_positions
        latent = self._latents(x if context is None else context, key_positions, start)
        mask_positions = key_positions
        if cache is not None:
            rows, mask_positions = cache.append(positions, latent=latent)
            latent, key_positions = rows["latent"], mask_positions
            if self.config.rebuilds_keys and key_positions is None:
                key_positions = cache.row_positions(latent.shape[1])
        return (
            query,
            latent,
            key_positions,
            self._mask(x.shape[1], latent.shape[1], positions, mask_positions),
        )

    def _queries(self, x: Tensor, positions: Tensor | None, start: int) -> Tensor:
        config = self.config
        if config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(2, (config.n_query_head, -1))
        if self.rotary is None:
            return query
        if config.rebuilds_keys:
            return self.rotary(query, positions, start)
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat([nope, self.rotary(rope, positions, start)], dim=-1)

    def _latents(self, source: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """What the cache keeps: normed latent ++ rotated key part."""
        down, rank = self.kv_a_proj_with_mqa(source), self.config.kv_lora_rank
        latent = self.kv_a_layernorm(down[..., :rank])
        if not self.config.qk_rope_head_dim:
            return latent
        assert self.rotary is not None
        rope = self.rotary(down[..., rank:].unsqueeze(2), positions, start).squeeze(2)
        return torch.cat([latent, rope], dim=-1)

    def _expand(self, latent: Tensor, key_positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys (B S K E) and values (B S K V) from the latents."""
        config = self.config
        latent, rope = latent.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        both = self.kv_b_proj(latent).unflatten(2, (config.n_kv_head, -1))
        key, value = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        if config.rebuilds_keys:
            assert self.rotary is not None
            key = self.rotary(key, key_positions)
        elif config.qk_rope_head_dim:
            key = torch.cat([key, rope.unsqueeze(2).expand(*key.shape[:3], -1)], dim=-1)
        return key, value

    def _ups(self) -> tuple[Tensor, Tensor]:
        """The rows of `kv_b_proj` that make keys (K N R) and those that make values (K V R)."""
        return self._per_head(self.kv_b_proj.weight)

    def _per_head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        per_head = rows.unflatten(0, (self.config.n_kv_head, -1))
        key, value = per_head.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        return key, value
