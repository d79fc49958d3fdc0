"""Multi-head, grouped-query and multi-query attention: one mechanism under three names.

MHA (Vaswani et al., 2017) has a key and value head for every query head, MQA (Shazeer, 2019) one for
all, GQA (Ainslie et al., arXiv 2305.13245) anything between.
"""

from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels
from rehead.attention.base import Attention
from rehead.attention.cache import LayerCache
from rehead.attention.grouped_config import GroupedConfig
from rehead.attention.mask import Mask
from rehead.attention.program import Attend, Norm, Program, Rotate, Store
from rehead.attention.rope import Rotary
from rehead.attention.score import SoftCapped
from rehead.attention.slot import Slot
from rehead.nn.linear import Linear
from rehead.nn.norm import NORMS


class GroupedAttention(Attention):
    """MHA, GQA or MQA. Weights have Hugging Face's names; heads are stacked along the rows of each projection.

    `q_proj` replaces the projection of the queries.
    """

    config: GroupedConfig

    def __init__(self, config: GroupedConfig, d_model: int, q_proj: Linear | None = None) -> None:
        super().__init__(config, d_model)
        q, k, v, o = config._widths()
        d_context = config.d_context or d_model
        self.q_proj = q_proj or Linear(d_model, q, bias=config.qkv_bias)
        self.k_proj = Linear(d_context, k, bias=config.qkv_bias)
        self.v_proj = None if config.tie_kv else Linear(d_context, v, bias=config.qkv_bias)
        self.o_proj = Linear(o, d_model, bias=config.o_bias)
        self.norms_heads = config.qk_norm_over == "head"
        norm, eps = NORMS[config.qk_norm], config.qk_norm_eps
        self.q_norm = None if eps is None else norm(config.head_dim if self.norms_heads else q, eps)
        self.k_norm = None if eps is None else norm(config.head_dim if self.norms_heads else k, eps)
        self.score = config.score.build(config.n_kv_head, config.group, config.head_dim)
        self.rotary = Rotary.of(config.rope, config.head_dim) if config.rope else None

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
        scale = self.config.scale
        gathered = kernels.attend(query, key, value, mask, scale=scale, score=self.score, pdrop=self._pdrop)
        return self.o_proj(self._from_slots(gathered).flatten(2))

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice:
        """Return the kernel that `forward` would use."""
        config = self.config
        heads, widths = (config.n_query_head, config.n_kv_head), (config.head_dim, config.v_head_dim)
        return self._choose((n_query, n_past, batch_size), heads, widths, config.scale, self.score)

    def one_token(self) -> str:
        """Describe how one token is decoded."""
        if self.score is not None and type(self.config.score) is not SoftCapped:
            return "slow, a learned score has only the reference kernel"
        return "two products per KV head, its group of query heads folded into the rows; keys are read once"

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token; with a learned score, a call of `forward`."""
        config, cap = self.config, None
        if type(config.score) is SoftCapped:
            cap = config.score.cap
        elif self.score is not None:
            return super().lower(program, x, layer)
        K, E, V = config.n_kv_head, config.head_dim, config.v_head_dim
        to_value = [] if self.v_proj is None else [(self.v_proj, K * V)]
        to_query = self.q_proj, config.n_query_head * E
        query, key, *values = program.linear(x, to_query, (self.k_proj, K * E), *to_value)
        H = query.width // E  # not the config's: as in `forward`, heads may have been cut out
        if self.norms_heads:
            query, key = query.split(H), key.split(K)
        if self.q_norm is not None:
            query = program.add(Norm(query, self.q_norm))
        if self.k_norm is not None:
            key = program.add(Norm(key, self.k_norm))
        if not self.norms_heads:
            query, key = query.split(H), key.split(K)
        if self.rotary is not None:
            heads = program.add(Rotate((query, key), self.rotary))
            query, key = heads.head(0, H), heads.head(H, K)
        rows: dict[str, tuple[Slot, ...]] = {"key": (key,)}
        for value in values:
            rows["value"] = (value.split(K),)
        program.add(Store(layer, rows))
        is_modular = config.head_map == "modular"
        gathered = program.add(
            Attend(layer, (query,), "key", list(rows)[-1], K, V, config.scale, is_modular, cap)
        )
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
        scale, dense = self.config.scale, mask.dense(x.device)
        weights = kernels.weights(query, key, dense, scale=scale, score=self.score)  # B K G L S
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
        query = self._heads(self.q_proj(x), self.q_norm)
        rows = {"key": self._heads(self.k_proj(source), self.k_norm)}
        if self.v_proj is not None:
            rows["value"] = self.v_proj(source).unflatten(2, (config.n_kv_head, config.v_head_dim))
        query = self.to_slots(query)
        key_positions = positions if context is None else context_positions
        if self.rotary is not None:
            query = self.rotary(query, positions, start)
            rows["key"] = self.rotary(rows["key"], key_positions, start)
        if cache is not None:
            rows, key_positions = cache.append(positions, **rows)
        key, value = rows["key"], rows["key" if config.tie_kv else "value"]
        return query, key, value, self._mask(x.shape[1], key.shape[1], positions, key_positions)

    def _heads(self, rows: Float[Tensor, "B L HE"], norm: nn.Module | None) -> Float[Tensor, "B L H E"]:
        """Split queries or keys into heads; norm them, if there is a `norm`, as a whole or each head by itself."""
        if norm is not None and not self.norms_heads:
            rows = norm(rows)
        heads = rows.unflatten(2, (-1, self.config.head_dim))
        return norm(heads) if norm is not None and self.norms_heads else heads

    def to_slots(self, query: Float[Tensor, "B L H E"]) -> Float[Tensor, "B L H E"]:
        """Reorder query heads by the KV head they read: 0, 3, 6, 9, 1, 4, ... for modular, K = 3."""
        if self.config.head_map == "contiguous":
            return query
        return query.unflatten(2, (-1, self.config.n_kv_head)).transpose(2, 3).flatten(2, 3)

    def _from_slots(self, gathered: Float[Tensor, "B L H V"]) -> Float[Tensor, "B L H V"]:
        """Undo `to_slots`: restore the order of the rows of `q_proj` and the columns of `o_proj`."""
        if self.config.head_map == "contiguous":
            return gathered
        return gathered.unflatten(2, (self.config.n_kv_head, -1)).transpose(2, 3).flatten(2, 3)
