"""Attention scores. The scaled dot product is the default."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rehead.errors import ConfigError
from rehead.fields import require_types
from rehead.registry import Registry

scores: Registry[type["ScoreConfig"]] = Registry("score")


class Score(nn.Module, ABC):
    """A score other than the scaled dot product; its weights, if any, are per query head, contiguous by KV head."""

    @abstractmethod
    def forward(
        self, query: Float[Tensor, "B L K G E"], key: Float[Tensor, "B S K E"]
    ) -> Float[Tensor, "B K G L S"]:
        """Scores before the mask and the softmax."""


class ScoreConfig(ABC):
    """The config of a score function."""

    scale: float | None = None
    """Factor of the dot products; None is 1 / sqrt(E)."""

    __no_type_check__ = True  # __post_init__ checks the arguments

    def __post_init__(self) -> None:
        require_types(self, "score ")

    def require_positive(self, *names: str) -> None:
        """Refuse numbers that are not positive, or not finite; None is a default."""
        for name in names:
            number, default = getattr(self, name), getattr(type(self), name)
            if number is not None and not 0 < number < math.inf:
                way = "Leave it out for the default" if default is None else f"Use {default}"
                raise ConfigError(f"score_{name}={number}: expected a positive number. {way}.")

    @abstractmethod
    def build(self, n_kv_head: int, group: int, head_dim: int) -> Score | None:
        """Build the score's module for `n_kv_head` x `group` query heads; None for the dot product."""

    def words(self) -> str:
        """Return what the scores are, for messages."""
        return "learned scores"

    def n_parameters(self, n_query_head: int, head_dim: int) -> int:
        """Number of parameters of one layer's score."""
        return 0

    def token_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs per token, as query and as key, that do not depend on other tokens."""
        return 0

    def key_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of the key's part of `token_flops`, which every decoded token computes again for every cached key."""
        return 0

    def pair_flops(self, head_dim: int) -> int:
        """FLOPs of one head's score for one pair of query and key; products only."""
        return 2 * head_dim


@scores.add("scaled_dot")
@dataclass(frozen=True, kw_only=True)
class ScaledDot(ScoreConfig):
    """k.q / sqrt(E): keeps the variance of a score near 1; every fast kernel computes it.

    `scale` is the factor instead of 1 / sqrt(E), as in Granite and Gemma.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("scale")

    def build(self, n_kv_head: int, group: int, head_dim: int) -> None:
        """Return None: there are no parameters."""
        return


@scores.add("soft_capped")
@dataclass(frozen=True, kw_only=True)
class SoftCapped(ScoreConfig):
    """cap tanh(k.q / (sqrt(E) cap)): no score is beyond `cap` (Gemma 2, arXiv 2408.00118).

    `scale` is the factor of the dot products instead of 1 / sqrt(E).
    """

    cap: float = 50.0
    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("cap", "scale")

    def words(self) -> str:
        """Return the cap."""
        return f"scores with a cap of {self.cap:g}"

    def build(self, n_kv_head: int, group: int, head_dim: int) -> "SoftCappedScore":
        """Build the module, which has no parameters."""
        return SoftCappedScore(self.cap, head_dim**-0.5 if self.scale is None else self.scale)


class SoftCappedScore(Score):
    """cap tanh(scale k.q / cap)."""

    def __init__(self, cap: float, scale: float) -> None:
        super().__init__()
        self.cap, self.scale, self.words = cap, scale, SoftCapped(cap=cap).words()

    def forward(
        self, query: Float[Tensor, "B L K G E"], key: Float[Tensor, "B S K E"]
    ) -> Float[Tensor, "B K G L S"]:
        """Scores before the mask and the softmax."""
        products = torch.einsum("blkge,bske->bkgls", query, key)
        return self.cap * torch.tanh(products * (self.scale / self.cap))


@scores.add("multiplicative")
@dataclass(frozen=True, kw_only=True)
class Multiplicative(ScoreConfig):
    """k.(W q) / sqrt(E): the same class as the dot product, unless q and k are rotated."""

    def build(self, n_kv_head: int, group: int, head_dim: int) -> "MultiplicativeScore":
        """Build one E x E matrix per query head, initialised to the identity."""
        return MultiplicativeScore(n_kv_head, group, head_dim)

    def n_parameters(self, n_query_head: int, head_dim: int) -> int:
        """H E^2 parameters."""
        return n_query_head * head_dim**2

    def token_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of W q."""
        return 2 * n_query_head * head_dim**2


class MultiplicativeScore(Score):
    """k.(W q) / sqrt(E)."""

    def __init__(self, n_kv_head: int, group: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(n_kv_head, group, 1, 1))  # K G E F

    def forward(
        self, query: Float[Tensor, "B L K G E"], key: Float[Tensor, "B S K E"]
    ) -> Float[Tensor, "B K G L S"]:
        """Scores before the mask and the softmax."""
        product = torch.einsum("kgef,blkgf->blkge", self.weight, query)
        return torch.einsum("blkge,bske->bkgls", product, key) / math.sqrt(key.shape[-1])


@scores.add("concatenated")
@dataclass(frozen=True, kw_only=True)
class Concatenated(ScoreConfig):
    """w.[k; q]. The query's part is one constant per row, so the softmax ignores the query."""

    def build(self, n_kv_head: int, group: int, head_dim: int) -> "ConcatenatedScore":
        """Build one vector of 2E per query head."""
        return ConcatenatedScore(n_kv_head, group, head_dim)

    def n_parameters(self, n_query_head: int, head_dim: int) -> int:
        """2 H E parameters."""
        return 2 * n_query_head * head_dim

    def token_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of w_k.k and w_q.q."""
        return 4 * n_query_head * head_dim

    def key_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of w_k.k."""
        return 2 * n_query_head * head_dim

    def pair_flops(self, head_dim: int) -> int:
        """Return 0: a pair needs one sum and no product."""
        return 0


class ConcatenatedScore(Score):
    """w.[k; q], the key's half of w first."""

    def __init__(self, n_kv_head: int, group: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(_normal(n_kv_head, group, 2 * head_dim))

    def forward(
        self, query: Float[Tensor, "B L K G E"], key: Float[Tensor, "B S K E"]
    ) -> Float[Tensor, "B K G L S"]:
        """Scores before the mask and the softmax."""
        for_key, for_query = self.weight.chunk(2, dim=-1)
        key_part = torch.einsum("kge,bske->bkgs", for_key, key)[:, :, :, None]
        query_part = torch.einsum("kge,blkge->bkgl", for_query, query)[..., None]
        return key_part + query_part


@scores.add("additive")
@dataclass(frozen=True, kw_only=True)
class Additive(ScoreConfig):
    """w.tanh(W [k; q] + b), `width` units per head.

    The bias is an addition of rehead: without it the score is odd in [k; q], and an odd function cannot
    approximate the angle or its cosine, which are even.
    """

    width: int = 64
    bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("width")

    def build(self, n_kv_head: int, group: int, head_dim: int) -> "AdditiveScore":
        """Build W (width, 2E), w (width) and b (width) per query head."""
        return AdditiveScore(n_kv_head, group, head_dim, self.width, self.bias)

    def n_parameters(self, n_query_head: int, head_dim: int) -> int:
        """H width (2E + 1) parameters, and H width more with the bias."""
        return n_query_head * self.width * (2 * head_dim + 1 + self.bias)

    def token_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of W_k k and W_q q."""
        return 4 * n_query_head * self.width * head_dim

    def key_flops(self, n_query_head: int, head_dim: int) -> int:
        """FLOPs of W_k k."""
        return 2 * n_query_head * self.width * head_dim

    def pair_flops(self, head_dim: int) -> int:
        """FLOPs of w.tanh(...)."""
        return 2 * self.width


class AdditiveScore(Score):
    """w.tanh(W [k; q] + b), the key's columns of W first."""

    def __init__(self, n_kv_head: int, group: int, head_dim: int, width: int, bias: bool) -> None:
        super().__init__()
        self.inner = nn.Parameter(_normal(n_kv_head, group, width, 2 * head_dim))
        self.outer = nn.Parameter(_normal(n_kv_head, group, width))
        self.bias = nn.Parameter(_normal(n_kv_head, group, width, std=1.0)) if bias else None

    def forward(
        self, query: Float[Tensor, "B L K G E"], key: Float[Tensor, "B S K E"]
    ) -> Float[Tensor, "B K G L S"]:
        """Scores before the mask and the softmax; memory B H L S width."""
        for_key, for_query = self.inner.chunk(2, dim=-1)
        key_part = torch.einsum("kgue,bske->bkgsu", for_key, key)[:, :, :, None]
        query_part = torch.einsum("kgue,blkge->bkglu", for_query, query)
        if self.bias is not None:
            query_part = query_part + self.bias[:, :, None]
        units = torch.tanh(key_part + query_part[:, :, :, :, None])
        return torch.einsum("kgu,bkglsu->bkgls", self.outer, units)


def _normal(*shape: int, std: float | None = None) -> Tensor:
    """Return normally distributed numbers; `std` defaults to 1 / sqrt(last size).

    In `rehead.model.skeleton` this draws and imports nothing, since `nn.init.normal_` is skipped there.
    """
    values = torch.empty(shape)
    nn.init.normal_(values, std=shape[-1] ** -0.5 if std is None else std)
    return values
