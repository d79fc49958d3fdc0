"""Run-time self-checks: a fast kernel is used only after it matches the reference on this device."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
"""Maximum relative error of a kernel against the reference in float64."""


def passes(error_of: Callable[[], float], budget: float, fallback: str) -> bool:
    """Whether the relative error `error_of()` is within `budget`; if not, or if it raises, log `fallback`."""
    try:
        error = error_of()
        fault = "" if error <= budget else f"off by {error:.1e} of the largest number"
    except Exception as problem:  # of a compiler or driver; in any case another kernel computes the same
        fault = f"{type(problem).__name__}: {problem}".splitlines()[0]
    if fault:
        warn_once(f"{fallback} ({fault})")
    return not fault


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest absolute error divided by the largest absolute value of `wanted`; infinity if there is a NaN."""
    error = (got - wanted).abs().max() / wanted.abs().max()
    return float(torch.nan_to_num(error, nan=float("inf")))


def seeded_normal(seed: int, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a function that draws normal numbers of any shape from its own generator."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(device, dtype)

    return draw


@cache
def warn_once(message: str) -> None:
    """Log each message once per process."""
    logging.getLogger("rehead").warning(message)
