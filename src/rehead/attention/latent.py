"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are rebuilt from one latent.

The cache stores R numbers per token, the latent, and P more with a decoupled rotary part.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels, latent_program
from rehead.attention.base import Attention
from rehead.attention.cache import LayerCache
from rehead.attention.key_scales import NormedScore, are_plain, inverse_rms
from rehead.attention.latent_config import LatentConfig
from rehead.attention.mask import Mask
from rehead.attention.program import Program
from rehead.attention.rope import Rotary
from rehead.attention.slot import Slot
from rehead.nn.linear import Linear

NORM_EPS = 1e-6
"""Eps of the latent norms, as in DeepSeek's classes in transformers; independent of the model's `norm_eps`."""


class LatentAttention(Attention):
    """MLA. Weights have DeepSeek's names; per head, `kv_b_proj` has the rows of the keys, then of the values."""

    config: LatentConfig

    def __init__(self, config: LatentConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        down, up, o, query = config._widths()
        self.scale = config.scale
        if config.q_lora_rank is None:
            self.q_proj = Linear(d_model, query, bias=config.qkv_bias)
        else:
            self.q_a_proj = Linear(d_model, config.q_lora_rank, bias=config.down_bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, query, bias=config.qkv_bias)
        self.kv_a_proj_with_mqa = Linear(config.d_context or d_model, down, bias=config.down_bias)
        self.kv_a_layernorm = (
            nn.RMSNorm(config.kv_lora_rank, eps=NORM_EPS) if config.latent_norm else nn.Identity()
        )
        self.kv_b_proj = Linear(config.kv_lora_rank, up, bias=config.qkv_bias)
        self.o_proj = Linear(o, d_model, bias=config.o_bias)
        aside, eps = config.qk_norm_head_dim, config.qk_norm_eps
        width, key_width = aside or config.qk_nope_head_dim, config.qk_nope_head_dim + config.qk_rope_head_dim
        self.q_norm = None if eps is None else nn.RMSNorm(width, eps=eps)
        self.k_norm = None if eps is None or aside else nn.RMSNorm(width, eps=eps)
        self.q_up_proj = self.k_scale_proj = None
        if aside:
            self.q_up_proj = Linear(aside, config.n_query_head * key_width, bias=False)
            d_source = config.d_context or d_model
            self.k_scale_proj = Linear(d_source, config.n_kv_head * aside, bias=config.qkv_bias)
        rotated_width = config.qk_rope_head_dim or config.qk_nope_head_dim
        self.rotary = Rotary.of(config.rope, rotated_width) if config.rope else None

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
        `cache`. `cache` keeps latents between calls; `config.cache(B)` creates one. `context_positions`
        (B, S) are for `context`. All tensors have the weights' dtype. Raises UsageError or InvalidInput for
        invalid arguments.
        """
        query, latent, key_positions, mask = self._project(x, context, positions, cache, context_positions)
        match self._form(x.shape[1], is_cached=cache is not None):
            case "expanded":
                gathered = self.expanded(query, latent, mask, key_positions)
            case "half absorbed":
                assert key_positions is not None
                gathered = self.half_absorbed(query, latent, mask, key_positions)
            case _:
                gathered = self.absorbed(query, latent, mask)
        return self.o_proj(gathered.flatten(2))

    def _form(self, n_query: int, *, is_cached: bool) -> str:
        """Return the form to use: expanded without a cache or for many queries, else absorbed or half absorbed."""
        if not is_cached or n_query >= self.config.absorbs_below:
            return "expanded"
        return "half absorbed" if self.config.rebuilds_keys else "absorbed"

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice:
        """Return the form and the kernel that `forward` would use."""
        config = self.config
        form = self._form(n_query, is_cached=n_past is not None)
        normed = form == "absorbed" and config.n_key_scale > 0
        if form == "half absorbed" or normed:
            *faster, reference = kernels.ROSTER
            why = "each key has a scale" if normed else "keys are rebuilt, latents summed"
            against = {kernel.name: why for kernel in faster}
            return kernels.Choice(reference, against, form)
        rope, n_head = config.qk_rope_head_dim, config.n_kv_head
        width, n_value = config.qk_nope_head_dim + rope, config.v_head_dim
        if form == "absorbed":
            n_head, width, n_value = 1, config.kv_lora_rank + rope, config.kv_lora_rank
        sizes, heads = (n_query, n_past, batch_size), (config.n_query_head, n_head)
        return replace(self._choose(sizes, heads, (width, n_value), self.scale), form=form)

    def one_token(self) -> str:
        """Describe how one token is decoded."""
        config = self.config
        if config.absorbs_below <= 1:
            return f"expanded, {config.n_kv_head} KV heads cost less than a latent of {config.kv_lora_rank}"
        if config.rebuilds_keys:
            return "rotated keys are rebuilt from all latents, so long contexts are slow; values are absorbed"
        if config.absorbs_below == float("inf"):
            return "absorbed, as any number of new tokens at once"
        return f"absorbed, as up to {math.ceil(config.absorbs_below) - 1} new tokens at once"

    def expanded(
        self,
        query: Float[Tensor, "B L H E"],
        latent: Float[Tensor, "B S RP"],
        mask: Mask,
        key_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L H V"]:
        """Rebuild the keys and values of each head from the latents, then attend as in MHA."""
        key, value = self._expand(latent, key_positions)
        return kernels.attend(query, key, value, mask, scale=self.scale, pdrop=self._pdrop)

    def absorbed(
        self, query: Float[Tensor, "B L H E"], latent: Float[Tensor, "B S RP"], mask: Mask
    ) -> Float[Tensor, "B L H V"]:
        """Move the expansion to the query's side: MQA whose one KV head is the latent.

        If keys are not normed, their bias adds the same number to all scores of a query, which the softmax ignores.
        """
        config = self.config
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        key_up, _ = self._ups()  # K N R
        nope = nope if self.k_norm is None else nope * self.k_norm.weight
        grouped = nope.unflatten(2, (config.n_kv_head, -1))
        query = torch.cat([torch.einsum("blkgn,knr->blkgr", grouped, key_up).flatten(2, 3), rope], dim=-1)
        rows = latent[:, :, None]
        key, value = rows[..., : query.shape[-1]], rows[..., : config.kv_lora_rank]
        score = None
        if config.n_key_scale:  # all of a score is divided by the RMS, also its rotary part
            bias = None if self.kv_b_proj.bias is None else self._per_head(self.kv_b_proj.bias)[0]
            score = NormedScore(grouped, bias, latent[..., query.shape[-1] :], self.scale)
        context = kernels.attend(query, key, value, mask, scale=self.scale, score=score, pdrop=self._pdrop)
        return self._expand_values(context, mask)

    def half_absorbed(
        self,
        query: Float[Tensor, "B L H E"],
        latent: Float[Tensor, "B S R"],
        mask: Mask,
        key_positions: Int[Tensor, "#B S"],
    ) -> Float[Tensor, "B L H V"]:
        """Rebuild and rotate the keys; sum latents instead of values."""
        assert self.rotary is not None
        key = self._unnormed_keys(latent)
        key = self.rotary(key if self.k_norm is None else self.k_norm(key), key_positions)
        weights = kernels.weights(query, key, mask.dense(query.device), scale=self.scale)
        weights = nn.functional.dropout(weights, self._pdrop)
        return self._expand_values(torch.einsum("bkgls,bsr->blkgr", weights, latent).flatten(2, 3), mask)

    def _expand_values(self, context: Float[Tensor, "B L H R"], mask: Mask) -> Float[Tensor, "B L H V"]:
        """Expand each head's weighted sum of latents to its weighted sum of values."""
        _, value_up = self._ups()
        grouped = context.unflatten(2, (self.config.n_kv_head, -1))
        values = torch.einsum("blkgr,kvr->blkgv", grouped, value_up)
        if self.kv_b_proj.bias is not None:  # the weights sum to 1, or to 0 where nothing is seen
            bias, dense = self._per_head(self.kv_b_proj.bias)[1][:, None], mask.dense(values.device)
            values = values + (bias if dense is None else bias * dense.any(dim=-1)[:, :, None, None, None])
        return values.flatten(2, 3)

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token, absorbed, or a call of `forward`.

        A call if it has fewer FLOPs and, with a scale for each key, for biases and norms that no operation computes.
        """
        config = self.config
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        is_plain = not config.qkv_bias and are_plain(*norms)
        if config.absorbs_below <= 1 or (config.n_key_scale and not is_plain):
            return super().lower(program, x, layer)
        return latent_program.lower(self, program, x, layer)

    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """Return the attention weights of one pass, from the expanded keys."""
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
        """Rotated queries, all latents that may be visible, their positions, and the mask."""
        self._check(x, context, positions, cache, context_positions)
        start = 0
        if cache is not None:
            positions, start = cache.next(x.shape[1]) if positions is None else positions, cache.length
        query = self._queries(x, positions, start)
        key_positions = positions if context is None else context_positions
        latent = self._latents(x if context is None else context, key_positions, start)
        mask_positions = key_positions
        if cache is not None:
            rows, mask_positions = cache.append(positions, latent=self._with_key_scales(latent))
            latent, key_positions = rows["latent"], mask_positions
            if self.config.rebuilds_keys and key_positions is None:
                key_positions = cache.row_positions(latent.shape[1])
        mask = self._mask(x.shape[1], latent.shape[1], positions, mask_positions)
        return query, latent, key_positions, mask

    def _queries(self, x: Tensor, positions: Tensor | None, start: int) -> Tensor:
        config = self.config
        if config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(2, (config.n_query_head, -1))
        if self.q_norm is not None:
            query = self.q_norm(query)
        if self.q_up_proj is not None:
            query = torch.einsum("blhe,hne->blhn", query, self._query_up())
        if self.rotary is None:
            return query
        if config.rebuilds_keys:
            return self.rotary(query, positions, start)
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat([nope, self.rotary(rope, positions, start)], dim=-1)

    def _latents(self, source: Tensor, positions: Tensor | None, start: int) -> Tensor:
        """Normed latent ++ rotated key part ++ 1 / RMS of keys that are not made from the latent."""
        down, rank = self.kv_a_proj_with_mqa(source), self.config.kv_lora_rank
        latent = self.kv_a_layernorm(down[..., :rank])
        if not self.config.qk_rope_head_dim:
            return latent
        assert self.rotary is not None
        rope = self.rotary(down[..., rank:].unsqueeze(2), positions, start).squeeze(2)
        parts = [latent, rope]
        if self.k_scale_proj is not None:
            assert self.config.qk_norm_eps is not None
            key = self.k_scale_proj(source).unflatten(2, (self.config.n_kv_head, -1))
            parts.append(inverse_rms(key, self.config.qk_norm_eps))
        return torch.cat(parts, dim=-1)

    def _with_key_scales(self, latent: Float[Tensor, "B L RP"]) -> Float[Tensor, "B L _"]:
        """Return the rows for the cache: `latent`, then 1 / RMS of each key if keys are normed and not rebuilt."""
        if not self.config.n_key_scale or self.k_norm is None:
            return latent
        assert self.k_norm.eps is not None
        return torch.cat([latent, inverse_rms(self._unnormed_keys(latent), self.k_norm.eps)], dim=-1)

    def _expand(self, latent: Tensor, key_positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys (B S K E) and values (B S K V) from the latents."""
        config = self.config
        widths = [config.kv_lora_rank, config.qk_rope_head_dim]
        latent, rope, scales = latent.split([*widths, latent.shape[-1] - sum(widths)], dim=-1)
        both = self.kv_b_proj(latent).unflatten(2, (config.n_kv_head, -1))
        key, value = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        if self.k_norm is not None:
            key = self.k_norm(key)
        if config.rebuilds_keys:
            assert self.rotary is not None
            key = self.rotary(key, key_positions)
        elif config.qk_rope_head_dim:
            key = torch.cat([key, rope.unsqueeze(2).expand(*key.shape[:3], -1)], dim=-1)
        return key if self.k_scale_proj is None else key * scales[..., None], value

    def _unnormed_keys(self, latent: Float[Tensor, "B S R"]) -> Float[Tensor, "B S K N"]:
        key = torch.einsum("bsr,knr->bskn", latent, self._ups()[0])
        return key if self.kv_b_proj.bias is None else key + self._per_head(self.kv_b_proj.bias)[0]

    def _query_up(self) -> Tensor:
        """The matrices that make queries from normed heads: (H, width of a query, `qk_norm_head_dim`)."""
        assert self.q_up_proj is not None
        return self.q_up_proj.weight.unflatten(0, (self.config.n_query_head, -1))

    def _ups(self) -> tuple[Tensor, Tensor]:
        """The rows of `kv_b_proj` that compute keys (K N R) and those that compute values (K V R)."""
        return self._per_head(self.kv_b_proj.weight)

    def _per_head(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        per_head = rows.unflatten(0, (self.config.n_kv_head, -1))
        key, value = per_head.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=1)
        return key, value
