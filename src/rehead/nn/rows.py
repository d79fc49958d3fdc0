"""Matrices a few rows at a time, so that there is never a second copy of a whole vocabulary."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

PART = 2**22
"""Numbers of a matrix that are computed at a time."""


def row_parts(matrix: Float[Tensor, "N E"]) -> Iterator[tuple[slice, Float[Tensor, "_ E"]]]:
    """Yield slices of a matrix's rows, and those rows."""
    at = 0
    for part in matrix.split(max(1, PART // matrix.shape[1])):
        yield slice(at, at + len(part)), part
        at += len(part)


def by_rows(function: Callable[[Tensor], Tensor], weight: Float[Tensor, "*N E"]) -> Float[Tensor, "*N E"]:
    """Return `function(weight)` in the dtype of `weight`, for a function that computes every row by itself."""
    if weight.numel() <= PART:
        return function(weight).to(weight.dtype)
    matrix = weight.flatten(0, -2) if weight.ndim > 1 else weight[:, None]
    result = torch.empty_like(matrix)
    for at, part in row_parts(matrix):
        result[at] = function(part)
    return result.view(weight.shape)
