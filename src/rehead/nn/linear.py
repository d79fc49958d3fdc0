"""Linear layers that are faster on a CPU: oneDNN in training, float32 products where the CPU has no 16-bit ones.

Measured on an AMD EPYC, one thread or two (docs/log.md). Training, 8192 rows and widths 192 to 768: forward 3 to 25 %,
gradient of the input 7 to 30 % faster; the gradient of the weights is as fast either way. bfloat16 and float16 without
AVX-512, 110 rows and more: forward 1.4 to 10 times as fast, gradients hundreds of times.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rehead.native.tracing import is_traced
from rehead.nn.rows import row_parts

WIDEN_FROM = 64
"""Rows from which widening the weight takes less time than it saves; with gradients it always does."""
MANY = 64
"""Rows from which oneDNN's product is faster without gradients, too."""


def linear(x: Float[Tensor, "... C"], weight: Float[Tensor, "D C"], bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b.

    For many rows of bfloat16 or float16, on a CPU that has no instructions for them, the products are those of
    float32. PyTorch adds them up in float32, too, so only the order of the sum differs, and rarely the rounding.
    """
    if not _widens(x, weight):
        return F.linear(x, weight, bias)
    widened: Tensor = _Widened.apply(x, weight, bias)
    return widened


class WideLinear(nn.Linear):
    """An `nn.Linear` that computes by `linear`."""

    def forward(self, input: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return x W^T + b."""
        return linear(input, self.weight, self.bias)


class Linear(WideLinear):
    """A `WideLinear` that uses oneDNN in float32 on an x86 CPU, in training and for many rows without gradients."""

    def forward(self, input: Float[Tensor, "... C"]) -> Float[Tensor, "... D"]:
        """Return x W^T + b."""
        if input.dtype == self.weight.dtype == torch.float32 and _has_onednn(input):
            if self.training and torch.is_grad_enabled() and self.weight.requires_grad:
                return _Product.apply(input, self.weight, self.bias)
            if not torch.is_grad_enabled() and input[..., 0].numel() >= MANY:
                return _product(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias)


def _widens(x: Tensor, weight: Tensor) -> bool:
    """Whether the product is faster in float32."""
    narrow = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not narrow or x.device.type != "cpu" or (x[..., 0].numel() < WIDEN_FROM and not learns):
        return False
    if torch.is_autocast_enabled("cpu") or is_traced():
        return False
    return not _multiplies(x.dtype)


def _multiplies(dtype: torch.dtype) -> bool:
    """Whether an x86 CPU has instructions for products in a dtype of 16 bits; True of other CPUs."""
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype == torch.bfloat16 or not capability.startswith("AVX"):
        return capability != "AVX2"
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def _has_onednn(x: Tensor) -> bool:
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or is_traced():
        return False
    return torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX")


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Widened(torch.autograd.Function):
    """A product in float32, of a part of the weight's rows at a time; its gradients are computed likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        result, wide = x.new_empty(*x.shape[:-1], len(weight)), x.float()
        for at, part in row_parts(weight):
            added = None if bias is None else bias[at].float()
            result[..., at] = F.linear(wide, part.float(), added)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        rows = gradient.float().reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[0]:
            sums = rows.new_zeros(len(rows), weight.shape[1])
            for at, part in row_parts(weight):
                sums += rows[:, at] @ part.float()
            to_x = sums.to(gradient.dtype).view(*gradient.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            read, to_weight = x.float().reshape(-1, x.shape[-1]), torch.empty_like(weight)
            for at, _ in row_parts(weight):
                to_weight[at] = rows[:, at].mT @ read
        if ctx.needs_input_grad[2]:
            to_bias = rows.sum(0).to(gradient.dtype)
        return to_x, to_weight, to_bias


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
        to_x = None
        if ctx.needs_input_grad[0]:  # oneDNN's product has no derivative
            to_x = gradient @ weight if torch.is_grad_enabled() else _product(gradient, weight.t())
        to_bias = rows.sum(0) if ctx.has_bias else None
        return to_x, rows.t() @ x.reshape(-1, x.shape[-1]), to_bias
