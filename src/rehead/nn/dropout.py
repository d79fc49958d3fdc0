"""Dropout that is cheap on a CPU: one 64-bit random number serves four elements, each of which uses 15 bits.

PyTorch draws a random number for every element, from a serial generator: a fifth of a training step (docs/log.md).
Masks come from torch's global generator, so a seed or a saved random state determines them for any number of threads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int16, Shaped
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rehead.native.tracing import is_traced

STEPS = 1 << 15
"""Probabilities are rounded to multiples of 1 / STEPS; the kept numbers are scaled by the rounded value."""
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type as wide as a float of this many bytes."""


def threshold(pdrop: float) -> int:
    """Return how many of `STEPS` equally likely draws drop a number."""
    return min(round(pdrop * STEPS), STEPS - 1)


def draw(shape: torch.Size | tuple[int, ...]) -> Int16[Tensor, "..."]:
    """Return uniform whole numbers below `STEPS`."""
    return raw_draw(shape).bitwise_and_(STEPS - 1)


def raw_draw(shape: torch.Size | tuple[int, ...]) -> Int16[Tensor, "..."]:
    """Return 16 random bits per number, four numbers from each 64-bit draw; `draw` keeps 15 of them."""
    n = torch.Size(shape).numel()
    words = torch.empty((n + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    return words.view(torch.int16)[:n].view(shape)


class _Dropout(torch.autograd.Function):
    """Saves a mask of integers for the backward pass: all bits set where a number is kept."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "..."], pdrop: float) -> Float[Tensor, "..."]:
        dropped = threshold(pdrop)
        mask = (dropped - 1 - draw(x.shape)) >> 15
        ctx.save_for_backward(mask)
        ctx.scale = STEPS / (STEPS - dropped)
        return _and(x, mask).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Float[Tensor, "..."]) -> tuple[Tensor, None]:
        return _and(gradient, *ctx.saved_tensors).mul_(ctx.scale), None


def _and(x: Tensor, mask: Shaped[Tensor, "..."]) -> Tensor:
    whole = WHOLE[x.element_size()]
    return (x.view(whole) & mask.to(whole)).view(x.dtype)


def dropout(x: Float[Tensor, "..."], pdrop: float) -> Float[Tensor, "..."]:
    """Return 0 with probability `pdrop` and x / (1 - pdrop) otherwise, independently for each number."""
    if pdrop == 0:
        return x
    return _Dropout.apply(x, pdrop) if is_ours(x) else F.dropout(x, pdrop)


def is_ours(x: Tensor) -> bool:
    """Return True on a CPU outside torch.compile, which has a fast dropout of its own and no bit views."""
    return x.device.type == "cpu" and not is_traced()


class Dropout(nn.Dropout):
    """Applies `dropout` in training; the identity in eval mode."""

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return `input` with dropout in training, and unchanged in eval mode."""
        return dropout(input, self.p) if self.training else input
