"""A complete attention variant in one file, to copy; tests/test_third_variant.py runs the contract tests on it.

One row per token is the key and the value of all query heads: MQA without a projection of values.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels
from rehead.attention.base import Attention, AttentionConfig
from rehead.attention.cache import LayerCache
from rehead.attention.mask import Mask
from rehead.attention.program import Attend, Program, Store
from rehead.attention.slot import Slot
from rehead.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ToyConfig(AttentionConfig):
    """`n_query_head` heads over one row of `head_dim` numbers per token."""

    n_query_head: int
    head_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("n_query_head", "head_dim")
        if self.rope is not None:  # a shared field that this variant has no use for
            raise ConfigError(
                "rope=True: the values of this variant are its keys, so it has no rope. Use rope=False."
            )

    @classmethod
    def examples(cls) -> dict[str, AttentionConfig]:
        """Return the variant with and without a window."""
        toy = cls(n_query_head=6, head_dim=10)
        return {"toy": toy, "toy, window": replace(toy, window=5)}

    @property
    def name(self) -> str:
        """Return toy."""
        return "toy"

    def build(self, d_model: int) -> "ToyAttention":
        """Build the module for activations of width `d_model`."""
        return ToyAttention(self, d_model)

    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """One row, of one head."""
        return {"row": (1, self.head_dim)}

    def n_parameters(self, d_model: int) -> int:
        """Number of parameters."""
        return self.projection_flops(d_model) // 2

    def projection_flops(self, d_model: int) -> int:
        """FLOPs of the three products."""
        return 2 * self.head_dim * (2 * self.n_query_head * d_model + (self.d_context or d_model))

    def attention_flops(self, n_key: int) -> int:
        """4 H E FLOPs per visible key."""
        return 4 * self.n_query_head * self.head_dim * n_key


class ToyAttention(Attention):
    """Queries, one row per token, and the output projection."""

    config: ToyConfig

    def __init__(self, config: ToyConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        heads = config.n_query_head * config.head_dim
        self.q_proj = nn.Linear(d_model, heads, bias=False)
        self.row_proj = nn.Linear(config.d_context or d_model, config.head_dim, bias=False)
        self.o_proj = nn.Linear(heads, d_model, bias=False)

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Attention over the tokens of `x` (B, L, D), or over `context` (B, S, C); returns (B, L, D).

        `positions` (B, L) are those of the tokens, -1 for padding; by default they follow those in `cache`, which
        keeps rows between calls. Raises UsageError or InvalidInput for invalid arguments.
        """
        query, row, mask = self._project(x, context, positions, cache, context_positions)
        return self.o_proj(kernels.attend(query, row, row, mask, pdrop=self._pdrop).flatten(2))

    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """Return the attention weights of one pass."""
        query, row, mask = self._project(x, context, positions, None, context_positions)
        return kernels.weights(query, row, mask.dense(x.device)).flatten(1, 2)

    def _project(
        self,
        x: Tensor,
        context: Tensor | None,
        positions: Tensor | None,
        cache: LayerCache | None,
        context_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor, Mask]:
        """Queries, all rows that may be visible, and the mask."""
        self._check(x, context, positions, cache, context_positions)
        if cache is not None and positions is None:
            positions = cache.next(x.shape[1])  # None while the tokens simply follow those in the cache
        query = self.q_proj(x).unflatten(2, (self.config.n_query_head, -1))
        row = self.row_proj(x if context is None else context)[:, :, None]
        row_positions = positions if context is None else context_positions
        if cache is not None:
            rows, row_positions = cache.append(positions, row=row)
            row = rows["row"]
        return query, row, self._mask(x.shape[1], row.shape[1], positions, row_positions)

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice:
        """Return the kernel that `forward` would use. Optional, as `lower`: for `bench --explain`."""
        sizes, E = (n_query, n_past, batch_size), self.config.head_dim
        return self._choose(sizes, (self.config.n_query_head, 1), (E, E), E**-0.5)

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token. Optional: without it, one token is a call of `forward`."""
        H, E = self.config.n_query_head, self.config.head_dim
        query, row = program.linear(x, (self.q_proj, H * E), (self.row_proj, E))
        program.add(Store(layer, {"row": (row,)}))
        gathered = program.add(Attend(layer, (query.split(H),), "row", "row", 1, E, E**-0.5))
        return program.linear(gathered.flat(), (self.o_proj, self.d_model))[0]
