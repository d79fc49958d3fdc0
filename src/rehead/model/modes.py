"""Context managers for training and eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)


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


def evaluated(model: Model) -> Model:
    """Return `model` if all of it is in eval mode, otherwise a copy in eval mode that shares its weights.

    Another thread can keep training the model meanwhile. A hook or a replaced `forward` may refer to the model itself
    and not to the copy.
    """
    if not any(part.training for part in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return deepcopy(model, shared).eval()
