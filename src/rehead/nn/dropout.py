"""Dropout that costs little on a CPU: 15 random bits a number instead of one draw of a serial generator.

PyTorch's own draws every number on its own, which took a third of a training step. Masks come from torch's global
generator, so a seed, and a saved random state, decide them, whatever the number of threads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int16, Shaped
from torch import Tensor, nn

STEPS = 1 << 15
"""Probabilities are rounded to multiples of 1 / STEPS; what is kept is divided by what was rounded to."""
WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers as wide as a float of so many bytes."""


def threshold(pdrop: float) -> int:
    """How many of `STEPS` equally likely draws drop a number."""
    return min(round(pdrop * STEPS), STEPS - 1)


def draw(shape: torch.Size | tuple[int, ...]) -> Int16[Tensor, "..."]:
    """Uniform whole numbers below `STEPS`."""
    return raw_draw(shape).bitwise_and_(STEPS - 1)


def raw_draw(shape: torch.Size | tuple[int, ...]) -> Int16[Tensor, "..."]:
    """16 random bits a number, four from each 64; `draw` leaves 15 of them."""
    n = torch.Size(shape).numel()
    words = torch.empty((n + 3) // 4, dtype=torch.int64, device="cpu").random_(-(2**63), None)
    return words.view(torch.int16)[:n].view(shape)


class _Dropout(torch.autograd.Function):
    """Keeps a mask of whole numbers, all bits set where a number is kept."""

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "..."], pdrop: float) -> Float[Tensor, "..."]:
        dropped = threshold(pdrop)
        kept = (dropped - 1 - draw(x.shape)) >> 15
        ctx.save_for_backward(kept)
        ctx.scale = STEPS / (STEPS - dropped)
        return _and(x, kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "..."]) -> tuple[Tensor, None]:
        return _and(gradient, *ctx.saved_tensors).mul_(ctx.scale), None


def _and(x: Tensor, kept: Shaped[Tensor, "..."]) -> Tensor:
    whole = WHOLE[x.element_size()]
    return (x.view(whole) & kept.to(whole)).view(x.dtype)


def dropout(x: Float[Tensor, "..."], pdrop: float) -> Float[Tensor, "..."]:
    """Zero with probability `pdrop`, otherwise x / (1 - pdrop), each number on its own."""
    if pdrop == 0:
        return x
    return _Dropout.apply(x, pdrop) if is_ours(x) else F.dropout(x, pdrop)


def is_ours(x: Tensor) -> bool:
    """True on a CPU and not in a compiled graph, which has its own fast ways and cannot see bits as other numbers."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class Dropout(nn.Dropout):
    """`dropout` in training, nothing otherwise."""

    def forward(self, input: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The same shape."""
        return dropout(input, self.p) if self.training else input
