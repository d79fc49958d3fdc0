"""Refuses numbers that are not finite, in a model or in its new weights."""

import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import materialise
from rehead.conversion.base import Weights
from rehead.errors import NumericError
from rehead.model import LanguageModel
from rehead.stages import staged

FEW = 2**22
"""Number of elements checked at once."""


def require_finite(model: LanguageModel) -> None:
    """Refuse a model with a weight that is NaN or infinite."""
    weights = list(model.named_parameters())
    for name, weight in staged(weights, "looking over the weights", len(weights), "tensors"):
        if not _finite(materialise(weight)):
            raise NumericError(
                f"{name} holds NaN or infinity: this model is damaged. Go back to one that is not."
            )


def _finite(weight: Tensor) -> bool:
    """Whether all numbers are finite; checked in parts, to bound the memory of the comparison."""
    return all(bool(part.isfinite().all()) for part in weight.flatten().split(FEW))


def require_holds(weights: Weights, dtype: torch.dtype, where: str) -> None:
    """Refuse new weights that the model's dtype cannot hold."""
    for name, weight in weights.items():
        if not _finite(materialise(weight).to(dtype)):
            kind = str(dtype).removeprefix("torch.")
            raise NumericError(
                f"{where}.{name} leaves the range of {kind}: convert a copy of the model in bfloat16 or float32, as "
                "`rehead export --dtype bf16` writes one."
            )
