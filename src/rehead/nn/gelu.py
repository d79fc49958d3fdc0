"""GELU in its tanh form."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.native import sequence


def gelu(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return `F.gelu(x, approximate="tanh")`; float32 training on a CPU uses rehead's C++ where it was compiled."""
    learns = torch.is_grad_enabled() and x.requires_grad
    if learns and x.dtype == torch.float32 and sequence.refuses(x) is None:
        return sequence.gelu(x)
    return F.gelu(x, approximate="tanh")
