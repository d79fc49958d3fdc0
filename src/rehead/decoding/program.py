"""A list of operations over fixed buffers, as decode.cpp runs it."""

import ctypes
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from rehead.native import NoKernel, library


class Kind(IntEnum):
    """The operations; decode.cpp says what each computes and what its fields mean."""

    EMBED, NORM, LINEAR, SPREAD, TURN, KEEP, ATTEND, GATE = range(8)


POINTERS = {"w", "b", "w2", "x", "y"}
INTEGERS = (
    "n",
    "k",
    "heads",
    "group",
    "rows",
    "x_row",
    "x_head",
    "x_kv",
    "y_row",
    "y_head",
    "y_kv",
    "w_head",
)


class Op(ctypes.Structure):
    """One operation, field for field the `Op` of decode.cpp."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in ("kind", "half", "sync", "act", "add")]
        + [(name, ctypes.c_void_p) for name in ("w", "b", "w2", "x", "y")]
        + [(name, ctypes.c_int64) for name in INTEGERS]
        + [("eps", ctypes.c_double)]
    )


def kernel() -> ctypes.CDLL | NoKernel:
    """decode.cpp, or why it is not there."""
    loaded = library("decode")
    if not isinstance(loaded, NoKernel):
        loaded.op_size.restype = ctypes.c_int64
        assert loaded.op_size() == ctypes.sizeof(Op)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded.step.argtypes = [pointer, number, pointer, pointer, number, number]
        loaded.step.restype = None
    return loaded


class Program:
    """Operations in order, and the tensors they point to, which it keeps alive."""

    def __init__(self, batch: int, n_thread: int) -> None:
        loaded = kernel()
        if isinstance(loaded, NoKernel):
            raise loaded
        self._library, self._n_thread = loaded, n_thread
        self._ops: list[Op] = []
        self._held: list[Tensor] = []
        self._array: Any = None
        self.batch = batch

    def buffer(self, width: int) -> Tensor:
        """(B, width) of floats."""
        return torch.zeros(self.batch, width, dtype=torch.float32)

    def add(self, kind: Kind, *, sync: bool = True, **fields: Tensor | int | float | None) -> None:
        """One more operation; tensors become pointers. `sync`: all threads wait for its end."""
        op = Op(kind=kind, sync=sync, heads=1, group=1)
        for name, value in fields.items():
            if isinstance(value, Tensor):
                self._held.append(value)
                if name in ("w", "w2", "b"):
                    op.half = op.half or value.dtype == torch.bfloat16
                setattr(op, name, value.data_ptr())
            elif value is not None:
                setattr(op, name, value)
        self._ops.append(op)

    def run(self, ids: Tensor, positions: Tensor) -> None:
        """All operations, for tokens `ids` (B,) at `positions` (B,), both int64 and contiguous."""
        if self._array is None:
            self._array = (Op * len(self._ops))(*self._ops)
        self._library.step(
            self._array, len(self._ops), ids.data_ptr(), positions.data_ptr(), self.batch, self._n_thread
        )
