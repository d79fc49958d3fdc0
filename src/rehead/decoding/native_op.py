"""The operations of decode.cpp and its memory layouts, as ctypes sees them."""

import ctypes
from enum import IntEnum

import torch
from torch import Tensor, nn

from rehead.native import KernelUnavailable, library


class Kind(IntEnum):
    """The operations of decode.cpp, which documents their computation and fields."""

    EMBED, NORM, LINEAR, EXPAND, ROTATE, STORE, ATTEND, GATE, SCALE, INVERSE_RMS, ATTEND_REBUILT, JOIN = (
        range(12)
    )


PARTS = 16
"""Shares of the rows from which keys are rebuilt, as in decode.cpp."""
FLAGS = ("kind", "bfloat16", "sync", "add", "gelu", "centred", "interleaved")
POINTERS = ("w", "w2", "b", "g", "cos", "sin", "x", "y")
INTEGERS = ("n", "k", "heads", "group", "rows", "column", "scales", "rotated")
STRIDES = ("x_row", "x_head", "x_kv", "y_row", "y_head", "y_kv", "w_head", "w_row", "w2_row", "b_head")


class NativeOp(ctypes.Structure):
    """One operation, with the same fields as `Op` in decode.cpp."""

    _fields_ = (
        [(name, ctypes.c_int64) for name in FLAGS]
        + [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in INTEGERS + STRIDES]
        + [(name, ctypes.c_double) for name in ("eps", "scale", "cap", "offset")]
    )


def kernel() -> ctypes.CDLL | KernelUnavailable:
    """Return the library of decode.cpp, or the reason why it is not available."""
    loaded = library("decode")
    if not isinstance(loaded, KernelUnavailable):
        loaded.op_size.restype = ctypes.c_int64
        assert loaded.op_size() == ctypes.sizeof(NativeOp)
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        loaded.step.argtypes = [pointer, number, pointer, pointer, number, number]
        loaded.step.restype = number
    return loaded


def is_readable(x: Tensor) -> bool:
    """Whether the numbers of a tensor are in the CPU's memory as they are, so that C++ may take its address."""
    if (
        type(x) not in (Tensor, nn.Parameter)
        or x.device.type != "cpu"
        or x.layout != torch.strided
        or x.is_neg()
    ):
        return False
    last = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return not x.numel() or x.untyped_storage().nbytes() >= (last + 1) * x.element_size()


def panels(key_up: Tensor) -> Tensor:
    """Return (K, N, R) in float32 as decode.cpp reads it: panels of 16 columns (K, N / 16, R, 16), the last padded."""
    padded = torch.nn.functional.pad(key_up.detach().float(), (0, 0, 0, -key_up.shape[1] % 16))
    return padded.unflatten(1, (-1, 16)).transpose(2, 3).contiguous()
