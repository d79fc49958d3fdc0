"""Linear layers that are faster on a CPU: oneDNN in training, products in float32 where there are no others.

Measured on an AMD EPYC, one thread or two (docs/log.md). Training, 8192 rows and widths 192 to 768: forward 3 to 25 %,
gradient of the input 7 to 30 % faster; the gradient of the weights is as fast either way. bfloat16 and float16 without
gradients, 110 rows and more: 1.4 to 5 times as fast.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

WIDEN_FROM = 64
"""Rows from which widening the weight takes less time than it saves."""
WIDENED = 2**22
"""Numbers of a weight that are widened at a time, so that there is never a copy of a whole vocabulary."""


def linear(x: Float[Tensor, "... C"], weight: Float[Tensor, "D C"], bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b.

    For many rows of bfloat16 or float16, on a CPU that has no instructions for them, the products are those of
    float32. PyTorch adds them up in float32, too, so only the order of the sum differs, and rarely the rounding.
    """
    if not _widens(x, weight):
        return F.linear(x, weight, bias)
    result, wide = x.new_empty(*x.shape[:-1], len(weight)), x.float()
    size, at = max(1, WIDENED // weight.shape[1]), 0
    for part in weight.split(size):
        added = None if bias is None else bias[at : at + len(part)].float()
        result[..., at : at + len(part)] = F.linear(wide, part.float(), added)
        at += len(part)
    return result


class WideLinear(nn.Linear):
    """An `nn.Linear` that computes by `linear`."""

    def forward(self, input: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return x W^T + b."""
        return linear(input, self.weight, self.bias)


class Linear(WideLinear):
    """A `WideLinear` that also uses oneDNN for float32 training on an x86 CPU."""

    def forward(self, input: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return x W^T + b."""
        learns = self.training and torch.is_grad_enabled() and self.weight.requires_grad
        if learns and input.dtype == self.weight.dtype == torch.float32 and _has_onednn(input):
            return _Product.apply(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def _widens(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is faster in float32. Gradients would need the widened weights again."""
    narrow = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    if not narrow or x.device.type != "cpu" or x[..., 0].numel() < WIDEN_FROM:
        return False
    if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not learns and torch.backends.cpu.get_cpu_capability() == "AVX2"


def _has_onednn(x: Tensor) -> bool:
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return False
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        to_x = _product(gradient, weight.t()) if ctx.needs_input_grad[0] else None
        to_bias = rows.sum(0) if ctx.has_bias else None
        return to_x, rows.t() @ x.reshape(-1, x.shape[-1]), to_bias
