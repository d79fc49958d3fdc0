"""What an error costs: two second moments, one of outputs and one of inputs, fitted together.

An error E in the weights that make keys and values costs E[(g^T E x)^2] to second order, with x the input of a
token and g the loss's gradient with respect to its keys and values. Computing that exactly takes the covariance
of g x^T, N C x N C, which is too large to hold. A Kronecker product P (x) C needs only two matrices, and `factor` has
a closed-form optimum for it. Separate estimates E[g g^T] and E[x x^T] are not that product: in a trained model the
first token of a text has huge inputs and gradients of its own, and separate moments spread each over all tokens.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rehead.checkpoint.files.shards import bytes_of
from rehead.data.files import resource

ROUNDS = 4
SHRINKAGE = 1e-2
"""Share of the mean variance added to all directions: a text is too short to show which are never needed."""
TOGETHER = 4096
"""Tokens read from disk at once."""


class Kept:
    """Keeps x and g of every token in a file, in the model's own dtype: they may exceed the memory."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.width = 0

    def add(self, inputs: Float[Tensor, "N C"], gradients: Float[Tensor, "N M"]) -> None:
        """Append the rows of some tokens."""
        rows = torch.cat([inputs, gradients.to(inputs.dtype)], dim=1).detach().cpu()
        self.width, self.split, self.dtype = rows.shape[1], inputs.shape[1], rows.dtype
        what = f"cannot keep the text's activations in {str(self.file)!r}"
        with resource(what, "free some space"), self.file.open("ab") as file:
            file.write(rows.contiguous().view(torch.uint8).numpy().data)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x and g of some tokens at a time, in float32 or wider."""
        n_token = self.file.stat().st_size // (self.width * self.dtype.itemsize)
        with self.file.open("rb") as file:
            for first in range(0, n_token, TOGETHER):
                rows = torch.empty(min(TOGETHER, n_token - first), self.width, dtype=self.dtype)
                file.readinto(bytes_of(rows))
                rows = rows.to(torch.promote_types(self.dtype, torch.float32))
                yield rows[:, : self.split], rows[:, self.split :]


def kronecker_pair(
    kept: Kept, rounds: int = ROUNDS, shrinkage: float = SHRINKAGE
) -> tuple[Float64[Tensor, "C C"], Float64[Tensor, "M M"]]:
    """Return C of the inputs and P of the outputs: P (x) C is the likeliest covariance of g x^T, up to scale.

    Fits a matrix normal distribution by alternating (Dutilleul 1999): C becomes E[(g^T P^-1 g) x x^T], P becomes
    E[(x^T C^-1 x) g g^T]. Each token is weighted by its other half, relative to that half's covariance, so that
    a few large tokens do not decide alone. Returns identities where all gradients are 0.
    """
    inputs, outputs = (torch.eye(part.shape[1], dtype=torch.float64) for part in next(iter(kept)))
    for _ in range(rounds):
        inputs = _shrunk(_normed(_weighed(((x, g) for x, g in kept), outputs.inverse())), shrinkage)
        outputs = _shrunk(_normed(_weighed(((g, x) for x, g in kept), inputs.inverse())), shrinkage)
    return inputs, outputs


def _weighed(pairs: Iterator[tuple[Tensor, Tensor]], moment: Float64[Tensor, "_ _"]) -> Tensor:
    """Return the sum of (b^T moment b) a a^T over tokens (a, b)."""
    total = torch.zeros(())
    for a, b in pairs:
        weight = ((b @ moment.to(b.dtype)) * b).sum(dim=1, keepdim=True)
        total = total + ((weight * a).mT @ a).double()
    return (total + total.mT) / 2


def _normed(moment: Tensor) -> Tensor:
    """Scale to norm 1; zeros become the identity."""
    norm = moment.norm()
    return torch.eye(len(moment), dtype=moment.dtype) if norm == 0 else moment / norm


def _shrunk(moment: Tensor, shrinkage: float) -> Tensor:
    return moment + shrinkage * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
