"""Context managers for training and eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Restore the mode (training or eval) of every submodule of `models` at the end, also after an exception."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Put `models` into eval mode; restore the mode of every submodule at the end."""
    with modes_kept(*models):
        for model in models:
            model.eval()
        yield
