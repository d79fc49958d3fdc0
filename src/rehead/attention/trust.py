"""A faster way is used where it has been seen to agree with the definition; where it has not, that is said once."""

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

BUDGET = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
"""How far off a kernel may be from the definition in float64, of the largest number."""


def agrees(far: Callable[[], float], most: float, otherwise: str) -> bool:
    """Whether `far()`, how far off a way is, is `most` at most; if not, or if it fails, `otherwise` is said."""
    try:
        off = far()
        fault = "" if off <= most else f"off by {off:.1e} of the largest number"
    except Exception as error:  # a compiler's, a driver's: whatever it is, there is another way
        fault = f"{type(error).__name__}: {error}".splitlines()[0]
    if fault:
        say(f"{otherwise} ({fault})")
    return not fault


def off(got: Tensor, wanted: Tensor) -> float:
    """The largest error, of the largest number it should be; infinite where it is none."""
    far = (got - wanted).abs().max() / wanted.abs().max()
    return float(torch.nan_to_num(far, nan=float("inf")))


def numbers(seed: int, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """Draws normal numbers of any shape; nobody else's change."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64, device="cpu").to(device, dtype)

    return draw


@cache
def say(message: str) -> None:
    """Each once a process."""
    logging.getLogger("rehead").warning(message)
