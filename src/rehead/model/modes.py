"""A model in another mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def modes_kept(*models: nn.Module) -> Iterator[None]:
    """Whatever happens inside, every part of `models` is afterwards in the mode (training or not) it was in."""
    modes = [(part, part.training) for model in models for part in model.modules()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """`models` in eval mode, without dropout; afterwards every part is in the mode it was in."""
    with modes_kept(*models):
        for model in models:
            model.eval()
        yield
