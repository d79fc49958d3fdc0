"""The norms of a model, by the names that a config gives them."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

NormKind = Literal["layernorm", "rmsnorm", "zero_centered_rmsnorm"]


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """RMSNorm(x) * (1 + weight), with weights that start at 0, in at least float32 (Gemma's)."""

    def reset_parameters(self) -> None:
        """Set the weights to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Norm the last axis."""
        exact = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(exact), self.normalized_shape, 1 + self.weight.to(exact), self.eps).to(x.dtype)


NORMS: dict[str, Callable[[int, float], nn.Module]] = {
    "layernorm": nn.LayerNorm,
    "rmsnorm": nn.RMSNorm,
    "zero_centered_rmsnorm": ZeroCenteredRMSNorm,
}
