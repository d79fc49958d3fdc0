"""Rotary position embedding (Su et al., arXiv 2104.09864)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention.rope_scaling import RopeScaling, YarnScaling
from rehead.errors import ConfigError
from rehead.fields import require_types

Layout = Literal["half-split", "interleaved"]


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """`theta` is the base of the angles; `layout` defines which elements of a head form a pair.

    half-split pairs (i, i + E/2) as in Hugging Face; interleaved pairs (2i, 2i + 1) as in the paper.
    They differ by a permutation of each head's rows. Only the first `partial_rotary_factor` of the numbers of a head
    rotate (GPT-NeoX's `rotary_pct`); the others have no position. E is then the width of that part.
    `scaling` changes the angles for contexts longer than those trained on; None leaves them as they are.
    """

    theta: float = 10_000.0
    layout: Layout = "half-split"
    scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0

    __no_type_check__ = True  # __post_init__ checks the arguments

    def __post_init__(self) -> None:
        if isinstance(self.scaling, dict):
            raise ConfigError(
                f"rope scaling={self.scaling!r:.80}. Use scalings['yarn'](factor=4.0), for example."
            )
        require_types(self, "rope ")
        if not 1 <= self.theta < math.inf:
            raise ConfigError(f"rope theta={self.theta}: the base of angles is at least 1. Use 10000.")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ConfigError(
                f"rope partial_rotary_factor={self.partial_rotary_factor}: a share of each head. Use a number above 0 "
                "up to 1, or rope=False."
            )
        if self.theta == 1 and isinstance(self.scaling, YarnScaling):
            raise ConfigError("rope theta=1 with yarn, which divides by its logarithm. Use 10000.")
        for name in () if self.scaling is None else self.scaling.bounded:
            least, value = 1 if name == "factor" else 1e-6, getattr(self.scaling, name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not least <= number <= 1e15:
                    raise ConfigError(f"rope scaling {name}={number}. Use {least:g} or more, up to 1e15.")

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

    @property
    def score_scale(self) -> float:
        """Additional factor of the scores if only a part of the key is rotated."""
        return 1.0 if self.scaling is None else self.scaling.score_scale

    def rotated(self, width: int) -> int:
        """Return how many numbers of a head of `width` rotate: the first ones, rounded down as in Hugging Face."""
        return int(width * self.partial_rotary_factor)

    def require_width(self, width: int) -> None:
        """Refuse a head of which an odd number of elements or none rotates, or that does not fit the scaling."""
        rotated = self.rotated(width)
        if rotated < 2 or rotated % 2:
            even = max(2, rotated - rotated % 2)
            raise ConfigError(
                f"partial_rotary_factor={self.partial_rotary_factor} rotates {rotated} of a head's {width} numbers: "
                f"rope rotates pairs. Use {math.ceil(1e6 * even / width) / 1e6:.6g}, which rotates {even}."
            )
        if self.scaling is not None:
            self.scaling.require_pairs(rotated // 2)

    def frequencies(self, width: int) -> Float[Tensor, " F"]:
        """Angle per position of each pair of a head of `width`: theta ** (-2i / E), float64."""
        rotated = self.rotated(width)
        half = torch.arange(rotated // 2, dtype=torch.float64, device="cpu")
        frequencies = self.theta ** (-2 * half / rotated)
        return frequencies if self.scaling is None else self.scaling.scale(frequencies, self.theta)


class Rotary:
    """Rotates heads of one width; caches the cosines and sines of positions 0, 1, ... for calls without positions.

    Angles are computed in float64 and applied in at least float32, so the rotation is also accurate in
    bfloat16 models: only its result is rounded.
    """

    _shared: ClassVar[WeakValueDictionary[tuple[RopeConfig, int], "Rotary"]] = WeakValueDictionary()

    @classmethod
    def of(cls, config: RopeConfig, width: int) -> "Rotary":
        """Return the rotation that all layers alike share, and with it its tables."""
        return cls._shared.setdefault((config, width), cls(config, width))

    def __init__(self, config: RopeConfig, width: int) -> None:
        self.config, self.head_dim, self.width = config, width, config.rotated(width)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, _: object) -> "Rotary":
        """Return the rotation itself: copies of a model share its tables."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[RopeConfig, int]]:
        """Pickle what it is made from, without its tables."""
        return Rotary.of, (self.config, self.head_dim)

    def __call__(
        self, x: Float[Tensor, "B L H E"], positions: Int[Tensor, "#B L"] | None = None, start: int = 0
    ) -> Float[Tensor, "B L H E"]:
        """Rotate pair i of every head by position * frequency i; `width` of its numbers rotate, the first ones.

        The default `positions` are start, start + 1, ...
        """
        return self.apply(x, *self.cos_sin(x.shape[1], x.dtype, x.device, positions, start))

    def cos_sin(
        self,
        n_token: int,
        dtype: torch.dtype,
        device: torch.device,
        positions: Int[Tensor, "#B L"] | None = None,
        start: int = 0,
    ) -> tuple[Float[Tensor, "*B L 1 E"], Float[Tensor, "*B L 1 E"]]:
        """Return cosine and signed sine for every rotated element of a head, as `apply` takes them."""
        exact = torch.promote_types(dtype, torch.float32)
        if positions is not None:
            return self._cos_sin(positions, exact)
        cos, sin = self._table(start + n_token, device, exact)
        return cos[start : start + n_token], sin[start : start + n_token]

    def apply(self, x: Float[Tensor, "*B H E"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*B H E"]:
        """Return `x` rotated."""
        if self.width < self.head_dim:
            first, others = x[..., : self.width], x[..., self.width :]
            return torch.cat([(first * cos + self._partner(first) * sin).to(x.dtype), others], dim=-1)
        return (x * cos + self._partner(x) * sin).to(x.dtype)

    def _table(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        table = self._tables.get((device, dtype))
        if table is None or len(table[0]) < length:
            rows = max(length, 2 * len(table[0]) if table else 64)
            with torch.inference_mode(False):  # a table computed while generating can be used in training
                table = self._cos_sin(torch.arange(rows, device=device), dtype)
            if type(table[0]) is Tensor:  # not one of a trace, which no other call can use
                self._tables[device, dtype] = table
        return table

    def _cos_sin(self, positions: Int[Tensor, "*B L"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angle = positions[..., None, None] * self.config.frequencies(self.head_dim).to(positions.device)
        cos, sin = angle.cos() * self.config.magnitude, angle.sin() * self.config.magnitude
        if self.config.layout == "half-split":
            cos, sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
        else:
            cos, sin = cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)
        return cos.to(dtype), sin.to(dtype)

    def _partner(self, x: Float[Tensor, "*B H E"]) -> Float[Tensor, "*B H E"]:
        """Return the other element of each element's pair."""
        if self.config.layout == "half-split":
            return x.roll(self.width // 2, dims=-1)
        return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
