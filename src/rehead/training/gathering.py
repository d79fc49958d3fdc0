"""Sharded tensors that the first process reads whole, one at a time."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rehead.checkpoint.files.deferred import Deferred

Result = TypeVar("Result")
END = -1


class Gathering:
    """Sharded tensors that the first process reads whole within `reading`, in any order, while the others take part.

    Nothing is kept: a tensor that is read twice is gathered twice.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._parts: list[DTensor] = []

    def deferred(self, value: Tensor) -> Tensor:
        """Return a tensor as it is or, if it is sharded, as one that is gathered when it is read.

        All processes defer the same tensors in the same order.
        """
        if not isinstance(value, DTensor):
            return value
        number = len(self._parts)
        self._parts.append(value)
        return Deferred(lambda: self._whole(self._said(number)), value.shape, value.dtype)

    def reading(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`, in which only the first process reads deferred tensors; then forget them."""
        if self._rank == 0:
            result = work()
            self._said(END)
        else:
            while (number := self._said(END)) != END:
                self._whole(number)
            result = work()
        self._parts.clear()
        return result

    def _whole(self, number: int) -> Tensor:
        return self._parts[number].full_tensor().cpu()

    def _said(self, number: int) -> int:
        """Return the first process's number in all of them."""
        said = torch.tensor(number, device=self._device)
        dist.broadcast(said, 0)
        return int(said)
