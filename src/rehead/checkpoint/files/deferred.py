"""Weights that are read when they are used and not kept in memory, so that a model may be larger than the memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from rehead.errors import UsageError


class Deferred(Tensor):
    """A tensor of known shape and dtype whose values are recomputed for every operation that reads them.

    Modules accept it like any other weight. If gradients are computed, autograd keeps the values until the backward
    pass. One that was moved to a device or cast is deferred, too: its values are moved or cast at every use.
    """

    make: Callable[[], Tensor]
    """Returns the values, perhaps in another dtype or on another device: `materialise` puts that right."""
    origins: frozenset[Any]
    """The objects that read the files of its values."""

    @staticmethod
    def __new__(
        cls,
        make: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        origins: frozenset[Any] = frozenset(),
        device: torch.device | None = None,
    ) -> "Deferred":
        """Create a tensor whose values `make` returns, in this shape."""
        empty: Deferred = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        empty.make, empty.origins = make, origins
        return empty

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another tensor of the same values, which are not copied: a module may move or cast either."""
        kind = nn.Parameter if isinstance(self, nn.Parameter) else Tensor.requires_grad_
        memo[id(self)] = kind(self.detach(), self.requires_grad)
        return memo[id(self)]

    def detach(self) -> "Deferred":
        """Return it without its gradient. PyTorch's own would first import its distributed tensors, for 0.75 s."""
        return Deferred(self.make, self.shape, self.dtype, self.origins, self.device)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub says so of a disabled one
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation on the values; the results of `detach` and `to` stay deferred."""
        kwargs = kwargs or {}
        if operation in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            one = args[0]
            dtype, device = kwargs.get("dtype") or one.dtype, kwargs.get("device") or one.device
            make = one.make if dtype == one.dtype else partial(materialise, one)
            return cls(make, one.shape, dtype, one.origins, device)
        named = zip(operation._schema.arguments, args, strict=False)
        for one, given in (*named, *((one, kwargs.get(one.name)) for one in operation._schema.arguments)):
            if one.is_write and any(isinstance(part, cls) for part in tree_leaves(given)):
                raise UsageError(
                    "the weights of this model are in files, and cannot be changed: load it with in_memory=True."
                )
        args, kwargs = tree_map_only(cls, materialise, (args, kwargs))
        return operation(*args, **kwargs)


def materialise(weight: Tensor) -> Tensor:
    """Return a weight's values in memory."""
    return weight.make().to(weight.device, weight.dtype) if isinstance(weight, Deferred) else weight


def map_deferred(change: Callable[..., Tensor], *weights: Tensor) -> Tensor:
    """Return `change(*weights)`; if a weight is deferred, the result is recomputed on every read.

    `change` is also called once with meta tensors to determine the shape and dtype of its result.
    """
    if not any(isinstance(weight, Deferred) for weight in weights):
        return change(*weights)
    with torch.device("meta"):
        like = change(*(torch.empty(weight.shape, dtype=weight.dtype) for weight in weights))
    origins = frozenset[Any]().union(*(weight.origins for weight in weights if isinstance(weight, Deferred)))
    return Deferred(
        lambda: change(*map(materialise, weights)), like.shape, like.dtype, origins, weights[0].device
    )


def map_weights(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Return `change(name, weight)` of every weight by name; of a tensor with two names once, for both."""
    first = {id(weight): name for name, weight in module.named_parameters()}
    done = {name: change(name, weight.detach()) for name, weight in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: done[first[id(weight)]] for name, weight in every}


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
