"""Run-time self-checks: a fast kernel runs only after it matched the reference on this device."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
"""Relative error that a kernel may have against the reference in float64."""


def passes(error_of: Callable[[], float], budget: float, otherwise: str) -> bool:
    """Whether the relative error `error_of()` is within `budget`; if not, or if it fails, logs `otherwise`."""
    try:
        error = error_of()
        fault = "" if error <= budget else f"off by {error:.1e} of the largest number"
    except Exception as problem:  # a compiler's, a driver's: whatever it is, another kernel computes the same
        fault = f"{type(problem).__name__}: {problem}".splitlines()[0]
    if fault:
        warn_once(f"{otherwise} ({fault})")
    return not fault


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The largest error relative to the largest number of `wanted`; infinite where there is a NaN."""
    error = (got - wanted).abs().max() / wanted.abs().max()
    return float(torch.nan_to_num(error, nan=float("inf")))


def seeded_normal(seed: int, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A function that draws normal numbers of any shape from a generator of its own."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(device, dtype)

    return draw


@cache
def warn_once(message: str) -> None:
    """Log each message once a process."""
    logging.getLogger("rehead").warning(message)
