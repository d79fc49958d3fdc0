"""Changes of rotary angles that let a model read texts longer than those it was trained on."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.errors import ConfigError
from rehead.fields import require_types
from rehead.registry import Registry

scalings: Registry[type["RopeScaling"]] = Registry("rope scaling")


class RopeScaling(ABC):
    """A change of the angles that lets a model read texts longer than those it was trained on.

    Names and formulas are Hugging Face's (`rope_type`), so a checkpoint's numbers keep their meaning.
    """

    bounded: ClassVar[tuple[str, ...]] = ()
    """Fields that a `RopeConfig` refuses below 1e-6 (`factor`: 1) and above 1e15."""

    __no_type_check__ = True  # __post_init__ checks the arguments

    def __post_init__(self) -> None:
        require_types(self, "rope scaling ")

    @abstractmethod
    def scale(self, frequencies: Float[Tensor, " F"], theta: float) -> Float[Tensor, " F"]:
        """Return the scaled angles per position, float64."""

    @property
    def magnitude(self) -> float:
        """Factor of cosine and sine (YaRN's attention factor)."""
        return 1.0

    @property
    def score_scale(self) -> float:
        """Additional factor of the scores if only a part of the key is rotated (DeepSeek's)."""
        return 1.0

    def require_pairs(self, n_pair: int) -> None:
        """Refuse a head of `n_pair` pairs; by default any number is accepted."""
        return


@scalings.add("linear")
@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv 2306.15595): every angle divided by `factor`."""

    factor: float
    bounded = ("factor",)

    def scale(self, frequencies: Float[Tensor, " F"], theta: float) -> Float[Tensor, " F"]:
        """Return the scaled angles per position, float64."""
        return frequencies / self.factor


@scalings.add("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a linear ramp between."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    bounded = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor > self.high_freq_factor > 0:
            raise ConfigError(
                f"rope scaling low_freq_factor={self.low_freq_factor} with high_freq_factor="
                f"{self.high_freq_factor}: the low one must not exceed the high one. Use 1 and 4, or swap them."
            )

    def scale(self, frequencies: Float[Tensor, " F"], theta: float) -> Float[Tensor, " F"]:
        """Return the scaled angles per position, float64."""
        rotations = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / self.factor)


@scalings.add("yarn")
@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv 2309.00071): a ramp over pair indices, and a larger magnitude.

    `mscale` and `mscale_all_dim` are DeepSeek's: together they move the magnitude to the scores.
    """

    factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 8192
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    bounded = (
        "factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "attention_factor", "mscale",
        "mscale_all_dim",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"rope scaling beta_fast={self.beta_fast} with beta_slow={self.beta_slow}: the fast one must not "
                "be below the slow one. Use 32 and 1, or swap them."
            )

    def scale(self, frequencies: Float[Tensor, " F"], theta: float) -> Float[Tensor, " F"]:
        """Return the scaled angles per position, float64."""
        half = len(frequencies)

        def pair_with_rotations(n: float) -> float:
            span = self.original_max_position_embeddings / (n * 2 * math.pi)
            return half * math.log(span) / math.log(theta)

        low = max(math.floor(pair_with_rotations(self.beta_fast)), 0)
        high = min(math.ceil(pair_with_rotations(self.beta_slow)), 2 * half - 1)
        pair = torch.arange(half, dtype=frequencies.dtype, device=frequencies.device)
        interpolate = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
        return frequencies * (1 - interpolate) + frequencies / self.factor * interpolate

    @property
    def magnitude(self) -> float:
        """`attention_factor` or g(mscale) / g(mscale_all_dim) if given, else g(1); g(m) = 0.1 m ln(factor) + 1."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    @property
    def score_scale(self) -> float:
        """(0.1 m ln(factor) + 1) ** 2 for mscale_all_dim = m."""
        return self._grown(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _grown(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@scalings.add("longrope")
@dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    """LongRoPE (arXiv 2402.13753): the angle of every pair is divided by its own factor.

    Hugging Face has a second list for texts above a certain length. Angles that change in the middle of a
    text would not match the keys in its cache, so rehead supports a single list.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0
    bounded = ("factors", "attention_factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factors:
            raise ConfigError("rope scaling factors=[]: expected a list of numbers, one for each pair.")

    def scale(self, frequencies: Float[Tensor, " F"], theta: float) -> Float[Tensor, " F"]:
        """Return the scaled angles per position, float64."""
        return frequencies / frequencies.new_tensor(self.factors)

    @property
    def magnitude(self) -> float:
        """The `attention_factor`."""
        return self.attention_factor

    def require_pairs(self, n_pair: int) -> None:
        """Refuse a number of pairs other than that of the factors."""
        if (count := len(self.factors)) != n_pair:
            raise ConfigError(f"longrope has {count} factors for {n_pair} pairs: give one for each.")
