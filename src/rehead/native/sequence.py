"""The functions of sequence.cpp as PyTorch operators with gradients, so that profilers and dispatch modes see them.

They are attention of many queries and GELU, in float32. The caller decides whether a call is faster than PyTorch's.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import once_differentiable

from rehead.native.build import KernelUnavailable, library, out_of_memory
from rehead.native.tracing import is_traced


class Array(ctypes.Structure):
    """Floats (B, L, H, E), with the same fields as `Array` in sequence.cpp."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "time", "head")))


SIZES = (
    "n_batch", "n_query", "n_key", "n_head", "group", "n_kv", "width", "n_value",
    "causal", "window", "drawn", "dropped",
)  # fmt: skip


class Sizes(ctypes.Structure):
    """The sizes of one call, with the same fields as `Sizes` in sequence.cpp."""

    _fields_ = (*((name, ctypes.c_int64) for name in SIZES), ("scale", ctypes.c_double))


def kernel() -> ctypes.CDLL | KernelUnavailable:
    """Return the library of sequence.cpp, or the reason why it is not available."""
    loaded = library("sequence")
    return loaded if isinstance(loaded, KernelUnavailable) else _declared(loaded)


@cache
def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Return the library with the argument types of its functions declared."""
    loaded.sizes_size.restype = ctypes.c_int64
    assert loaded.sizes_size() == ctypes.sizeof(Sizes)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.gelu_forward.argtypes = [pointer] * 2 + [number] * 2
    loaded.gelu_backward.argtypes = [pointer] * 3 + [number] * 2
    loaded.attend_forward.argtypes = [pointer] * 7 + [number]
    loaded.attend_backward.argtypes = [pointer] * 11 + [number]
    loaded.gelu_forward.restype = loaded.gelu_backward.restype = None
    loaded.attend_forward.restype = loaded.attend_backward.restype = number
    return loaded


def refuses(*tensors: Tensor) -> str | None:
    """Return the reason why these tensors cannot be computed in C++; None if they can.

    Compiled graphs are refused: torch.compile generates its own kernels.
    """
    if is_traced():
        return "a compiled graph or a transform of torch.func"
    if any(x.device.type != "cpu" for x in tensors):
        return "not on a CPU"
    if any(unpack_dual(x).tangent is not None for x in tensors):
        return "forward derivatives are asked for"
    loaded = kernel()
    return str(loaded) if isinstance(loaded, KernelUnavailable) else None


def _run(name: str, *given: Any) -> None:
    """Call a function of the library: tensors become pointers, and the number of threads is the last argument.

    Raises ResourceError if a thread ran out of memory.
    """
    loaded = kernel()
    if isinstance(loaded, KernelUnavailable):
        raise loaded
    arguments = [t.data_ptr() if isinstance(t, Tensor) else t for t in given]
    if getattr(loaded, name)(*arguments, torch.get_num_threads()):
        raise out_of_memory("attention")


def _require_floats(name: str, like: Tensor, *others: Tensor) -> None:
    """Refuse tensors that are not float32 on a CPU, or of another shape than the first."""
    for t in (like, *others):
        if t.dtype != torch.float32 or t.device.type != "cpu":
            raise ValueError(f"{name} of {t.dtype} on {t.device}: it computes float32 on a CPU")
        if t.shape != like.shape:
            raise ValueError(f"{name} of shapes {tuple(like.shape)} and {tuple(t.shape)}: they must be alike")


def _array(t: Tensor) -> Any:
    assert t.shape[3] == 1 or t.stride(3) == 1
    return ctypes.byref(Array(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)))


def _dense(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with a contiguous last axis."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors]


def _sizes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draws: Tensor | None,
    causal: bool,
    window: int,
    dropped: int,
    scale: float,
) -> Any:
    """Return the sizes of a call for the kernel. Raises ValueError for sizes that would exceed a buffer."""
    batch, n_query, n_head, width = query.shape
    _, n_key, n_kv, n_value = value.shape
    drawn = 0 if draws is None else draws.shape[-1]
    if key.shape != (batch, n_key, n_kv, width) or len(value) != batch or not n_kv or n_head % n_kv:
        raise ValueError(
            f"queries {query.shape}, keys {key.shape}, values {value.shape} do not fit each other"
        )
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in (query, key, value)):
        raise ValueError("queries, keys and values are float32 on a CPU")
    if window < 0 or not 0 <= dropped < 1 << 15:
        raise ValueError(f"window={window} and dropped={dropped}: at least 0, and dropped below {1 << 15}")
    if not n_key or (causal and n_query > n_key):
        raise ValueError(f"{n_query} queries, causal={causal}, have {n_key} keys")
    if draws is not None:
        n_seen = min(window or n_key, n_key)
        if draws.shape != (batch, n_head, n_query, n_seen) or draws.dtype != torch.int16:
            raise ValueError(
                f"{draws.dtype} draws {draws.shape} for {(batch, n_head, n_query, n_seen)} weights"
            )
        if not draws.is_contiguous():
            raise ValueError("draws are not contiguous")
    return ctypes.byref(
        Sizes(
            batch, n_query, n_key, n_head, n_head // n_kv, n_kv, width, n_value, causal, window, drawn, dropped, scale
        )
    )  # fmt: skip


# PyTorch's decorator `custom_op` is avoided: its first call imports PyTorch's compiler (1.6 s and 145 MB).
_OPERATORS = torch.library.Library("rehead", "DEF")
_RULE = "bool causal, int window, int dropped, float scale"
_OPERATORS.define(
    f"attend(Tensor query, Tensor key, Tensor value, Tensor? draws, {_RULE}) -> (Tensor, Tensor)"
)
_OPERATORS.define(
    "attend_backward(Tensor query, Tensor key, Tensor value, Tensor? draws, Tensor out, Tensor logs, Tensor upstream, "
    f"{_RULE}) -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.define("gelu(Tensor x) -> Tensor")
_OPERATORS.define("gelu_backward(Tensor x, Tensor upstream) -> Tensor")


def _attend(
    query: Tensor, key: Tensor, value: Tensor, draws: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor]:
    query, key, value = _dense(query, key, value)
    sizes = _sizes(query, key, value, draws, *rule)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    logs = query.new_empty(query.shape[0], query.shape[2], query.shape[1])
    _run("attend_forward", sizes, _array(query), _array(key), _array(value), draws, _array(out), logs)
    return out, logs


def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draws: Tensor | None,
    out: Tensor,
    logs: Tensor,
    upstream: Tensor,
    *rule: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, out, upstream = _dense(query, key, value, out, upstream)
    sizes = _sizes(query, key, value, draws, *rule)
    batch, n_query, n_head, _ = query.shape
    wanted = query.new_empty(()).expand(batch, n_query, n_head, value.shape[3])
    _require_floats("attend_backward", wanted, out, upstream)
    _require_floats("attend_backward", query.new_empty(()).expand(batch, n_head, n_query), logs)
    logs = logs.contiguous()
    grads = query.new_empty(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)
    inputs = _array(query), _array(key), _array(value), draws, _array(out), _array(upstream)
    _run("attend_backward", sizes, *inputs, logs, *map(_array, grads))
    return grads


def _gelu(x: Tensor) -> Tensor:
    _require_floats("gelu", x)
    x = x.contiguous()
    y = torch.empty_like(x)
    _run("gelu_forward", x, y, x.numel())
    return y


def _gelu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    _require_floats("gelu_backward", x, upstream)
    x, upstream = x.contiguous(), upstream.contiguous()
    to_x = torch.empty_like(x)
    _run("gelu_backward", x, upstream, to_x, x.numel())
    return to_x


for _name, _kernel in (
    ("attend", _attend),
    ("attend_backward", _attend_backward),
    ("gelu", _gelu),
    ("gelu_backward", _gelu_backward),
):
    _OPERATORS.impl(_name, _kernel, "CPU")


def _attend_shapes(
    query: Tensor, key: Tensor, value: Tensor, draws: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor]:
    batch, n_query, n_head, _ = query.shape
    return query.new_empty(batch, n_query, n_head, value.shape[3]), query.new_empty(batch, n_head, n_query)


_OPERATORS.impl("attend", _attend_shapes, "Meta")
_OPERATORS.impl("attend_backward", lambda *given: tuple(x.new_empty(x.shape) for x in given[:3]), "Meta")
_OPERATORS.impl("gelu", lambda x: x.new_empty(x.shape), "Meta")
_OPERATORS.impl("gelu_backward", lambda x, _: x.new_empty(x.shape), "Meta")


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, draws: Tensor | None, *rule: Any
    ) -> Tensor:
        out, logs = torch.ops.rehead.attend(query, key, value, draws, *rule)
        ctx.save_for_backward(query, key, value, draws, out, logs)
        ctx.rule = rule
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return (*torch.ops.rehead.attend_backward(*ctx.saved_tensors, upstream, *ctx.rule), *[None] * 5)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.ops.rehead.gelu(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need PyTorch's own operator
            return torch.ops.aten.gelu_backward(upstream, x, approximate="tanh")
        return torch.ops.rehead.gelu_backward(x, upstream)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draws: Tensor | None,
    causal: bool,
    window: int,
    dropped: int,
    scale: float,
) -> Tensor:
    """Attention of queries (B, L, H, E) over keys (B, S, K, E) and values (B, S, K, V).

    Causal queries are the last L of S. Each sees `window` keys, 0 for all. `draws` (B, H, L, W), int16, are for the W
    keys from the first visible one: a weight is dropped if the low 15 bits are below `dropped`. Raises ValueError for
    sizes that do not match.
    """
    given = query, key, value, draws, causal, window, dropped, scale
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return _Attend.apply(*given)
    return torch.ops.rehead.attend(*given)[0]


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    return _Gelu.apply(x) if torch.is_grad_enabled() and x.requires_grad else torch.ops.rehead.gelu(x)
