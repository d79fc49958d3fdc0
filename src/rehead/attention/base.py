"""The contract of every attention variant.

Letters, in annotations as written and in einsum in lower case (docs/notation.md compares them with other documents'):

    B  batch              H  query heads               E  key width of a head
    L  query positions    K  key/value heads           V  value width of a head
    S  key positions      G  query heads per KV head   R  latent width
    D  model width        C  width of the context (cross-attention)

Time is axis 1 of every tensor that has it: activations, cache rows and latents alike.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import kernels
from rehead.attention.cache import LayerCache
from rehead.attention.call import require_call, require_sizes
from rehead.attention.mask import Mask
from rehead.attention.program import Call, Program
from rehead.attention.rope import RopeConfig
from rehead.attention.slot import Slot
from rehead.errors import ConfigError
from rehead.fields import require_types
from rehead.registry import Registry

variants: Registry[type["AttentionConfig"]] = Registry("attention variant")

LARGEST = 1 << 17
"""Upper bound of a size, so that a damaged or malicious config is refused."""

FILLED: Any = None
"""Default of a field that `__post_init__` fills in from the others."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ABC):
    """Fields that all variants share.

    `d_context` is the width of the context in cross-attention; None means self-attention.
    `causal` defaults to True for self-attention. `window` is the number of keys a query sees, its own
    included. `rope=True` means `RopeConfig()`. `attn_pdrop` is the dropout of attention weights in training.
    """

    d_context: int | None = None
    causal: bool = FILLED
    window: int | None = None
    rope: RopeConfig | None = None
    attn_pdrop: float = 0.0

    __no_type_check__ = True  # annotations describe the fields as stored; __post_init__ checks the arguments

    def __post_init__(self) -> None:
        if self.causal is None:
            self.fill(causal=self.d_context is None)
        if isinstance(self.rope, bool):
            self.fill(rope=RopeConfig() if self.rope else None)
        require_types(self)
        if self.d_context is not None:
            self.require_positive("d_context")
        if self.causal and self.d_context is not None:
            raise ConfigError(
                f"causal=True with d_context={self.d_context}: queries and keys of two sequences have no "
                "common order. Use causal=False."
            )
        if self.window is not None and (self.window < 1 or not self.causal):
            raise ConfigError(
                f"window={self.window} with causal={self.causal}: a window is the number of visible keys, "
                "the query's own included, of a causal attention. Use window=1 or more with causal=True."
            )
        if not 0 <= self.attn_pdrop < 1:
            raise ConfigError(f"attn_pdrop={self.attn_pdrop}: a probability. Use 0 up to (not including) 1.")

    def fill(self, **values: object) -> None:
        """Set fields whose default depends on other fields; only `__post_init__` calls it."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def require_positive(self, *names: str) -> None:
        """Refuse a size below 1 or above `LARGEST`."""
        for name in names:
            size = getattr(self, name)
            if size < 1:
                raise ConfigError(f"{name}={size!r}: a size is a whole number of at least 1.")
            if size > LARGEST:
                raise ConfigError(f"{name}={size}: no model has that many. Use at most {LARGEST:,}.")

    @staticmethod
    def require_eps(eps: float | None) -> None:
        """Refuse an eps of the norms of queries and keys that is not a small positive number."""
        if eps is not None and not 0 < eps < 1:
            raise ConfigError(f"qk_norm_eps={eps}: a small positive number. Use 1e-6, or None.")

    @staticmethod
    def require_width(d_model: int) -> None:
        """Refuse an invalid width of activations."""
        if isinstance(d_model, bool) or not isinstance(d_model, int) or d_model < 1:
            raise ConfigError(
                f"d_model={d_model!r}: the width of x is a whole number of at least 1, such as 192."
            )

    def require_turns(self, width: int, name: str) -> None:
        """Refuse to rotate an odd width, or one that does not match the rope."""
        assert self.rope is not None
        if width % 2 and self.rope.partial_rotary_factor == 1:
            even = f"{width - 1} or {width + 1}" if width > 1 else "2"
            raise ConfigError(f"{name}={width} is odd: rope rotates pairs. Use {even}, or rope=False.")
        self.rope.require_width(width)

    @classmethod
    @abstractmethod
    def examples(cls) -> dict[str, "AttentionConfig"]:
        """Return small configs by name, for the docs and the contract tests."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The registered name of this config."""

    @property
    def n_map(self) -> int:
        """Number of attention maps: one per query head by default."""
        return int(getattr(self, "n_query_head", 1))

    def describe(self) -> str:
        """Describe the attention in a few words, for tables and certificates."""
        return f"{self.name}{self._position()}"

    def _position(self) -> str:
        """The part of `describe` about rope and window."""
        rope = self.rope
        rotated = "" if rope is None else ", rope" + ("" if rope.layout == "half-split" else " interleaved")
        if rope is not None and rope.partial_rotary_factor < 1:
            rotated += f" in {100 * rope.partial_rotary_factor:.3g} % of a head"
        return rotated + (f", window {self.window}" if self.window else "")

    def equivalent(self) -> "AttentionConfig":
        """Return a config of the same function for which more conversions exist; `self` by default."""
        return self

    @abstractmethod
    def build(self, d_model: int) -> "Attention":
        """Build the module for activations of width `d_model`."""

    @abstractmethod
    def cache_rows(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the rows that one token adds to the cache, by name."""

    @abstractmethod
    def n_parameters(self, d_model: int) -> int:
        """Number of parameters of the module."""

    @abstractmethod
    def projection_flops(self, d_model: int) -> int:
        """FLOPs per token of the projections; one multiply-add is 2."""

    @abstractmethod
    def attention_flops(self, n_key: int) -> int:
        """FLOPs of the scores and the weighted sum of values for one query over `n_key` visible keys."""

    def decode_flops(self, d_model: int, n_key: int) -> int:
        """FLOPs of one decoded token that sees `n_key` keys, its own included; the others are cached."""
        return self.projection_flops(d_model) + self.attention_flops(n_key)

    def kv_numbers(self, tp: int = 1) -> int:
        """Cache elements per token on the fullest of `tp` GPUs, which split the heads but each hold all latents."""
        rows = self.cache_rows().values()
        return sum(width * math.prod(math.ceil(n / tp) for n in heads) for *heads, width in rows)

    def cache(
        self,
        batch_size: int,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LayerCache:
        """Return an empty cache for one layer: a ring buffer with a window, else growing if `capacity` is None."""
        require_sizes(batch_size, capacity)
        return LayerCache(
            self.cache_rows(),
            batch_size=batch_size,
            capacity=capacity,
            window=self.window,
            dtype=dtype,
            device=device,
        )


class Attention(nn.Module, ABC):
    """An attention layer: `module(x)`, or `module(x, context)` for cross-attention."""

    def __init__(self, config: AttentionConfig, d_model: int) -> None:
        super().__init__()
        config.require_width(d_model)
        self.config, self.d_model = config, d_model

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Attention over the tokens of `x` (B, L, D), or over `context` (B, S, C); returns (B, L, D).

        `positions` (B, L) or (1, L) are those of the tokens; by default they follow those in `cache`, or start at 0.
        Below 0 is padding: it is not attended to, and its output is that of the biases alone. `cache` keeps what
        `config.cache_rows` lists between calls, for inference only; `config.cache(B)` creates one. `context_positions`
        (B, S) are for `context`. All tensors have the weights' dtype. Raises UsageError or InvalidInput otherwise.
        """

    if TYPE_CHECKING:
        __call__ = forward

    @abstractmethod
    def weights(
        self,
        x: Float[Tensor, "B L D"],
        context: Float[Tensor, "B S C"] | None = None,
        positions: Int[Tensor, "#B L"] | None = None,
        context_positions: Int[Tensor, "#B S"] | None = None,
    ) -> Float[Tensor, "B H L S"]:
        """Attention weights of one forward pass without a cache, computed by the reference kernel."""

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of `forward` for one new token, with the cache of `layer`; returns the output.

        By default this is one `Call` of the module, which PyTorch executes.
        """
        return program.add(Call(x, self, x.width, layer))

    def choice(self, n_query: int, n_past: int | None = None, batch_size: int = 1) -> kernels.Choice | None:
        """The kernel that `forward` would use for `n_query` tokens after `n_past` cached ones, in the current mode.

        `n_past=None` means no cache. Nothing is computed. Returns None unless a variant implements it (by `_choose`).
        """
        return None

    def one_token(self) -> str:
        """Describe the result of `lower` in words."""
        return "a forward pass of its own"

    def _choose(
        self,
        sizes: tuple[int, int | None, int],
        heads: tuple[int, int],
        widths: tuple[int, int],
        scale: float,
        score: kernels.ScoreFunction | None = None,
    ) -> kernels.Choice:
        """Return the kernel for a call of these `sizes` (see `choice`) with H and K `heads` of `widths` E and V."""
        (n_query, n_past, batch_size), window = sizes, self.config.window
        past = n_past or 0
        n_key = n_query + (past if window is None else min(past, window - 1))
        weight = next(self.parameters())
        shapes = ((n_query, heads[0], widths[0]), (n_key, heads[1], widths[0]), (n_key, heads[1], widths[1]))
        zero = torch.zeros((), dtype=weight.dtype, device=weight.device, requires_grad=weight.requires_grad)
        mask = self._mask(n_query, n_key, None, None)
        query, key, value = (zero.expand(batch_size, *shape) for shape in shapes)  # not allocated
        return kernels.choose(kernels.Call(query, key, value, mask, scale, score, self._pdrop))

    def _check(
        self,
        x: Tensor,
        context: Tensor | None = None,
        positions: Tensor | None = None,
        cache: object = None,
        context_positions: Tensor | None = None,
    ) -> None:
        """Refuse invalid arguments of `forward`."""
        weight = next(self.parameters())
        require_call(self.config, self.d_model, weight, x, context, positions, cache, context_positions)

    def _mask(
        self,
        n_query: int,
        n_key: int,
        query_positions: Tensor | None,
        key_positions: Tensor | None,
    ) -> Mask:
        return Mask(
            n_query=n_query,
            n_key=n_key,
            causal=self.config.causal,
            window=self.config.window,
            query_positions=query_positions,
            key_positions=key_positions,
        )

    @property
    def _pdrop(self) -> float:
        return self.config.attn_pdrop if self.training else 0.0
