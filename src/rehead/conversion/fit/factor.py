"""A matrix as a thin product, so that its inputs can be cached as few numbers.

Arrays may be NumPy's or torch's; what comes back is of the same kind.
"""

import functools
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Num
from torch import Tensor

from rehead.errors import ConfigError, NumericError

P = ParamSpec("P")
T = TypeVar("T", bound=tuple[Any, ...])
RIDGE = 1e-9
"""Share of the mean variance added to a second moment, so that every direction counts."""


class Factors(NamedTuple):
    """`up` (N, R) times `down` (R, C), and the energy of every direction, kept ones first (min(N, C),)."""

    up: Any
    down: Any
    energy: Any

    @property
    def lost(self) -> float:
        """Share of the energy in the directions that were cut off."""
        energy = self.energy.tolist()  # summed exactly: NumPy and torch round sums in ways of their own
        total = math.fsum(energy)
        return math.fsum(energy[self.down.shape[0] :]) / total if total else 0.0


def accepts_arrays(function: Callable[P, T]) -> Callable[P, T]:
    """Let a function of tensors take NumPy arrays; it then returns NumPy arrays."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not any(isinstance(value, np.ndarray) for value in [*args, *kwargs.values()]):
            return function(*args, **kwargs)
        found = function(*map(_tensor, args), **{key: _tensor(value) for key, value in kwargs.items()})
        arrays = [part.numpy() if isinstance(part, Tensor) else part for part in found]
        return type(found)(*arrays) if hasattr(found, "_fields") else type(found)(arrays)

    return call


def _tensor(value: Any) -> Any:
    return (
        torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value
    )  # any strides, any owner


@accepts_arrays
def factor(
    weight: Num[Tensor, "N C"],
    rank: int,
    inputs: Float[Tensor, "C C"] | None = None,
    outputs: Float[Tensor, "N N"] | None = None,
) -> Factors:
    """Return the best product of `rank`: it minimises tr(P (W - W') C (W - W')^T), C `inputs`, P `outputs`.

    Without both this is the truncated SVD. With C, the second moment E[x x^T], it keeps what the
    outputs of W vary in (whitened, or output PCA: SVD-LLM, CARE and TransMLA all are this operator).
    With P as well it counts an error in an output by how much that output matters. At full rank,
    min(N, C), the product is exact whatever C and P. W' is W times a projection, so rows of zeros in W
    are zeros in `up`, too. Factors are in the dtype of W, or float64 if that is not floating point.
    Raises ConfigError for a rank out of range.
    """
    largest = min(weight.shape)
    if not isinstance(rank, Integral) or not 1 <= rank <= largest:
        raise ConfigError(
            f"rank={rank} of a matrix {tuple(weight.shape)}: use 1 to {largest}, where it is exact."
        )
    if not weight.isfinite().all():
        raise NumericError(f"a matrix {tuple(weight.shape)} holds NaN or infinity: it has no factors.")
    work = weight.double()
    seen, matters = None, None
    if rank < largest:  # else any weighting would only cost digits
        seen, matters = (_root(moment) for moment in (inputs, outputs))
    scaled = work if matters is None else matters @ work
    left, values, _ = torch.linalg.svd(scaled if seen is None else scaled @ seen, full_matrices=False)
    kept = left[:, :rank]
    up = kept if matters is None else torch.linalg.solve(matters, kept)
    up = up.masked_fill(~work.any(dim=1, keepdim=True), 0)  # the solvers leave rounding errors there
    dtype = weight.dtype if weight.is_floating_point() else work.dtype
    return Factors(up.to(dtype), (kept.mT @ scaled).to(dtype), values.square())


class _Pair(NamedTuple):
    W_UM: Any
    W_DKV: Any


class SharedLatent(_Pair):
    """`W_UM` (D, N) times `W_DKV` (N, D) is the tiled matrix; prints as shapes and error (A in docs/sources.md).

    Unpacks as `W_UM, W_DKV`, up before down.
    """

    mse: float
    """Mean squared error of the product, in float64."""

    def __new__(cls, W_UM: Any, W_DKV: Any, mse: float = math.nan) -> "SharedLatent":  # noqa: N803  names of document A
        """`mse` is NaN where it was not computed, as in a copy by `_replace`."""
        made = super().__new__(cls, W_UM, W_DKV)
        made.mse = mse
        return made

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in self._asdict().items())
        return f"{shapes}, mse {self.mse:.2g}"


def gqa_to_mla(weight: Any, n_copy: int | None = None) -> SharedLatent:
    """`GQA_2_MLA` of docs/sources.md (A): up (D, N) and down (N, D) whose product is `weight` tiled D/N times.

    `weight` stacks the key or the value projections of G heads, N = G d rows. Tiling whole copies is
    the modular head map: query head h reads KV head h mod G. It takes one matrix: keys and values factored this
    way have two different latents and a cache of 2 G d numbers; for a shared latent, stack them and use `factor`.
    """
    up, down, mse = _tiled(weight, n_copy)
    return SharedLatent(up, down, mse.item())


@accepts_arrays
def _tiled(weight: Num[Tensor, "..."], n_copy: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the two factors and the mean squared error of their product."""
    if weight.dim() != 2:
        raise ConfigError(
            f"weight has shape {tuple(weight.shape)}: one projection of all KV heads is a matrix, (G d, D). "
            "Give two axes."
        )
    rows, width = weight.shape
    if n_copy is None:
        n_copy = width // rows
        if rows * n_copy != width:
            raise ConfigError(
                f"{rows} rows do not divide the width {width}: give n_copy, the heads per KV head."
            )
    up, down, _ = factor(weight, min(rows, width))
    up = up.repeat(n_copy, 1)
    return up, down, (up.double() @ down.double() - weight.double().repeat(n_copy, 1)).square().mean()


def _root(moment: Float[Tensor, "N N"] | None) -> Tensor | None:
    """Return the symmetric square root of a second moment with a ridge."""
    if moment is None:
        return None
    if not moment.isfinite().all():
        raise NumericError("the calibration text gave activations that are not finite.")
    values, vectors = torch.linalg.eigh(moment.double())
    ridge = RIDGE * float(values.clamp(min=0).mean())
    return (vectors * (values.clamp(min=0) + ridge).sqrt()) @ vectors.mT
