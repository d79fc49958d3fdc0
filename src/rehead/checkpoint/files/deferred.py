"""Weights that are read when they are used and not kept in memory, so that a model may be larger than the memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


class Deferred(Tensor):
    """A tensor of known shape and dtype whose values are recomputed for every operation that reads them.

    Modules accept it like any other weight. If gradients are computed, autograd keeps the values until the backward
    pass.
    """

    make: Callable[[], Tensor]
    origins: frozenset[Any]
    """The objects that read the files of its values."""

    @staticmethod
    def __new__(
        cls,
        make: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        origins: frozenset[Any] = frozenset(),
    ) -> "Deferred":
        """Create a tensor whose values `make` returns, in this shape and dtype."""
        empty: Deferred = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        empty.make, empty.origins = make, origins
        return empty

    def __deepcopy__(self, memo: dict[int, Any]) -> "Deferred":
        """Return the same tensor: it cannot change."""
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub says so of a disabled one
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values; the result of `detach` stays deferred."""
        if operation is torch.ops.aten.detach.default:
            return cls(args[0].make, args[0].shape, args[0].dtype, args[0].origins)
        args, kwargs = tree_map_only(cls, materialise, (args, kwargs or {}))
        return operation(*args, **kwargs)


def materialise(weight: Tensor) -> Tensor:
    """Return a weight's values in memory."""
    return weight.make() if isinstance(weight, Deferred) else weight


def map_deferred(change: Callable[..., Tensor], *weights: Tensor) -> Tensor:
    """Return `change(*weights)`; if a weight is deferred, the result is recomputed on every read.

    `change` is also called once with meta tensors to determine the shape and dtype of its result.
    """
    if not any(isinstance(weight, Deferred) for weight in weights):
        return change(*weights)
    with torch.device("meta"):
        like = change(*(torch.empty(weight.shape, dtype=weight.dtype) for weight in weights))
    origins = frozenset[Any]().union(*(weight.origins for weight in weights if isinstance(weight, Deferred)))
    return Deferred(lambda: change(*map(materialise, weights)), like.shape, like.dtype, origins)


def origins(module: nn.Module) -> frozenset[Any]:
    """Return the objects that read the files of the module's deferred weights."""
    weights = (weight for weight in module.parameters() if isinstance(weight, Deferred))
    return frozenset[Any]().union(*(weight.origins for weight in weights))


def in_memory(module: nn.Module) -> None:
    """Read the deferred weights of `module` into memory."""
    for part, name, weight in _places(module):
        setattr(part, name, nn.Parameter(materialise(weight), requires_grad=weight.requires_grad))


@contextmanager
def held(module: nn.Module) -> Iterator[None]:
    """Keep the deferred weights of `module` in memory within the block, which is worth it if they are used often."""
    places = _places(module)
    try:
        in_memory(module)
        yield
    finally:
        for part, name, weight in places:
            setattr(part, name, weight)


def _places(module: nn.Module) -> list[tuple[nn.Module, str, Deferred]]:
    """Return the deferred weights of `module`, each with its owner and name."""
    return [
        (part, name, weight)
        for part in module.modules()
        for name, weight in part.named_parameters(recurse=False)
        if isinstance(weight, Deferred)
    ]
