"""Linear layers applied to few rows, as in decoding, where most of the time goes into reading the weights."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rehead.nn.linear import Linear, WideLinear

JOIN_BELOW = 2**23
"""Total bytes up to which the weights applied to one input are joined in a copy: a call costs more than that."""
SPLIT_FROM = 2**20
"""Bytes of a weight from which several threads read it: waking them costs more below."""
PACKED_FROM = 2**22
"""Bytes of a weight from which oneDNN's product of a few rows is faster than the BLAS's."""


def is_plain(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is its weight and bias and nothing else."""
    return type(layer) in (nn.Linear, WideLinear, Linear) and "forward" not in vars(layer)


class JoinedLinear:
    """Applies `layers` to the same few rows and concatenates their outputs: (B, D) to (B, N1 + N2 + ...).

    Small weights of several plain layers are copied into one at construction; others are read in place.
    Construct a new one after weights change.
    """

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        self.joined: tuple[Tensor, Tensor | None] | None = None
        plain = [layer for layer in layers if is_plain(layer)]
        if len(plain) < len(layers):
            return
        weights, biases = [layer.weight for layer in plain], [layer.bias for layer in plain]
        if len(layers) == 1:
            self.joined = weights[0], biases[0]
        elif sum(weight.nbytes for weight in weights) <= JOIN_BELOW:
            bias = None
            if any(one is not None for one in biases):
                bias = torch.cat(
                    [
                        b if b is not None else w.new_zeros(len(w))
                        for w, b in zip(weights, biases, strict=True)
                    ]
                )
            self.joined = torch.cat(weights), bias

    def __call__(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B N"]:
        """Return the outputs of all layers, concatenated."""
        if self.joined is not None:
            return linear_few_rows(x, *self.joined)
        parts = [linear_few_rows(x, y.weight, y.bias) if is_plain(y) else y(x) for y in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def linear_few_rows(
    x: Float[Tensor, "B D"], weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "B N"]:
    """`F.linear` for few rows: as fast as the weight can be read.

    On a CPU in float32, the BLAS reads it with one thread for one row, and slowly for a few. So one row is computed
    as a batch of products with parts of the weight, and several rows by oneDNN.
    """
    plain = type(weight) in (Tensor, nn.Parameter)  # inference mode does not let others be split
    if not plain or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    n_out, n_in = weight.shape
    n_thread = torch.get_num_threads()
    n_part = max(n_thread, 2)
    if len(x) == 1 and n_out % n_part == 0 and (n_thread == 1 or weight.nbytes >= SPLIT_FROM):
        parts = weight.view(n_part, n_out // n_part, n_in)
        column = x.view(1, 1, n_in).expand(n_part, 1, n_in).transpose(1, 2)
        if bias is None:
            return torch.bmm(parts, column).view(1, n_out)
        return torch.baddbmm(bias.view(n_part, -1, 1), parts, column).view(1, n_out)
    if weight.nbytes >= PACKED_FROM and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
