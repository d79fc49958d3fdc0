"""One token more for every row of a batch: what decoding needs of a layer, and nothing else.

`Attention.forward` is the definition; a step computes the same for one new token. What all layers share of it (where
the token stands, its turns, who is hidden from it) is made once, in a `Moment`; weights are read through `Product`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention.cache import LayerCache, Place
from rehead.attention.mask import visible
from rehead.attention.rope import Rotary
from rehead.nn.linear import Linear

Step = Callable[[Tensor, LayerCache, "Moment"], Tensor]
"""x (B, D), what the layer remembers, and the moment: what x gathers, (B, D). The cache has one token more then."""

FUSE_BELOW = 2**23
"""Weights read by the same input are joined in one copy up to that many bytes: a call costs more than the copy."""
SPLIT_FROM = 2**20
"""Bytes of a weight from which several threads read it: waking them costs more below."""
PACKED_FROM = 2**22
"""Bytes of a weight from which oneDNN's product of a few rows is faster than the BLAS's."""


class Moment(ABC):
    """Where the new token of each row stands: after `start` others, or each row at its own of `positions`."""

    def __init__(self, start: int, positions: Int[Tensor, "B 1"] | None) -> None:
        self.start, self.positions = start, positions
        self._turns: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._hidden: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def turn(self, rotary: Rotary, x: Float[Tensor, "B H E"]) -> Float[Tensor, "B H E"]:
        """Heads of the new tokens, turned to where these stand."""
        key = rotary.config, rotary.width, x.dtype
        if key not in self._turns:
            cos, sin = self._own_turns(rotary, x)
            self._turns[key] = cos[..., 0, :, :], sin[..., 0, :, :]  # of the one token
        return rotary.apply(x, *self._turns[key])

    @abstractmethod
    def turn_keys(
        self, rotary: Rotary, key: Float[Tensor, "B S K E"], cache: LayerCache
    ) -> Float[Tensor, "B S K E"]:
        """All keys that `remember` gave, rebuilt, turned to where they stand."""

    @abstractmethod
    def remember(self, cache: LayerCache, **new: Tensor) -> list[Float[Tensor, "BK S _"]]:
        """Store the new token's rows, (B, ...) each; all rows that may be seen, in the cache's order."""

    @abstractmethod
    def hidden(self, cache: LayerCache, n_head: int, dtype: torch.dtype) -> Float[Tensor, "BK 1 S"] | None:
        """What is added to the scores of `n_head` KV heads: 0, or minus infinity for what is hidden."""

    @abstractmethod
    def _own_turns(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of where the new tokens stand."""


class NextToken(Moment):
    """The token after those in a cache: the caches of all layers make room for it and store it."""

    def __init__(self, cache: LayerCache) -> None:
        super().__init__(cache.length, cache.next(1))
        self._places: dict[tuple[int, int | None], Place] = {}

    def turn_keys(
        self, rotary: Rotary, key: Float[Tensor, "B S K E"], cache: LayerCache
    ) -> Float[Tensor, "B S K E"]:
        """See `Moment.turn_keys`."""
        n_key, standing = key.shape[1], (id(self._places.get((cache.n_rows, cache.window))), key.shape[1])
        whole = (rotary.config, rotary.width, key.dtype, *standing)
        if whole not in self._turns:
            if self.positions is None:
                place = None if n_key == cache.length else cache.row_positions(n_key)
            else:
                place = self._places[cache.n_rows, cache.window].known[:, :n_key]
            self._turns[whole] = rotary.turns(n_key, key.dtype, key.device, place)
        return rotary.apply(key, *self._turns[whole])

    def advance(self, cache: LayerCache) -> Place | None:
        """Make room for the new token; where it goes, if rows stand at positions of their own."""
        key = cache.reserve_one(), cache.window
        if self.positions is None:
            return None
        if key not in self._places:
            self._places[key] = cache.place(self.positions)
        return self._places[key]

    def remember(self, cache: LayerCache, **new: Tensor) -> list[Float[Tensor, "BK S _"]]:
        """See `Moment.remember`."""
        return cache.append_one(self.advance(cache), **new)

    def hidden(self, cache: LayerCache, n_head: int, dtype: torch.dtype) -> Float[Tensor, "BK 1 S"] | None:
        """See `Moment.hidden`."""
        if self.positions is None:
            return None
        place = self._places[cache.n_rows, cache.window]
        key = id(place), n_head, dtype
        if key not in self._hidden:
            seen = visible(self.positions, place.known[:, : place.n_used], cache.window)  # B 1 S
            bias = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
            self._hidden[key] = bias[:, None].expand(-1, n_head, -1, -1).flatten(0, 1)
        return self._hidden[key]

    def _own_turns(self, rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
        return rotary.turns(1, x.dtype, x.device, self.positions, self.start)


def attend_token(
    query: Float[Tensor, "N G E"],
    key: Float[Tensor, "N S E"],
    value: Float[Tensor, "N S V"],
    scale: float,
    hidden: Float[Tensor, "N 1 S"] | None = None,
) -> Float[Tensor, "N G V"]:
    """`Folded` for one token, N = B K: two products over all rows, which nothing repeats."""
    return torch.bmm(token_weights(query, key, scale, hidden), value)


def token_weights(
    query: Float[Tensor, "N G E"],
    key: Float[Tensor, "N S E"],
    scale: float,
    hidden: Float[Tensor, "N 1 S"] | None = None,
) -> Float[Tensor, "N G S"]:
    """The attention weights of one token."""
    added = query.new_empty(()) if hidden is None else hidden
    scores = torch.baddbmm(added, query, key.transpose(1, 2), beta=0 if hidden is None else 1, alpha=scale)
    exact = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=exact).to(scores.dtype)


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is its weight and bias and nothing else."""
    return type(layer) in (nn.Linear, Linear)


class Product:
    """`layers` of the same input on few rows, their outputs side by side: (B, D) to (B, N1 + N2 + ...).

    Small weights are joined in a copy, made here and now; larger ones are read where they are. Whoever changes weights
    makes a new product.
    """

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        self.joined: tuple[Tensor, Tensor | None] | None = None
        plain = [layer for layer in layers if is_plain(layer)]
        if len(plain) < len(layers):
            return
        weights, biases = [layer.weight for layer in plain], [layer.bias for layer in plain]
        if len(layers) == 1:
            self.joined = weights[0], biases[0]
        elif sum(weight.nbytes for weight in weights) <= FUSE_BELOW:
            bias = None
            if any(one is not None for one in biases):
                bias = torch.cat(
                    [
                        b if b is not None else w.new_zeros(len(w))
                        for w, b in zip(weights, biases, strict=True)
                    ]
                )
            self.joined = torch.cat(weights), bias

    def __call__(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """All outputs."""
        if self.joined is not None:
            return few(x, *self.joined)
        parts = [few(x, y.weight, y.bias) if is_plain(y) else y(x) for y in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def few(
    x: Float[Tensor, "B D"], weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "B N"]:
    """`F.linear` for few rows: as fast as the weight can be read.

    On a CPU in float32, the BLAS reads it with one thread for one row, and slowly for a few: one row is a batch of
    products with parts of the weight, several rows go through oneDNN.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    n_out, n_in = weight.shape
    n_thread = torch.get_num_threads()
    n_part = max(n_thread, 2)
    if len(x) == 1 and n_out % n_part == 0 and (n_thread == 1 or weight.nbytes >= SPLIT_FROM):
        parts = weight.view(n_part, n_out // n_part, n_in)
        column = x.view(1, 1, n_in).expand(n_part, 1, n_in).transpose(1, 2)
        if bias is None:
            return torch.bmm(parts, column).view(1, n_out)
        return torch.baddbmm(bias.view(n_part, -1, 1), parts, column).view(1, n_out)
    if weight.nbytes >= PACKED_FROM and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
