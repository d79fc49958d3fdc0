"""What sequence.cpp computes, as operators of PyTorch: `torch.compile`, tracing and autograd see them as any other.

Attention of many queries and GELU, in float32. Nothing here checks whether a call is worth it.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from rehead.native.build import NoKernel, library


class Array(ctypes.Structure):
    """(B, L, H, E) of floats, field for field the `Array` of sequence.cpp."""

    _fields_ = (("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "time", "head")))


SIZES = (
    "n_batch", "n_query", "n_key", "n_head", "group", "n_kv", "width", "n_value",
    "causal", "window", "drawn", "dropped",
)  # fmt: skip


class Sizes(ctypes.Structure):
    """Of one call, field for field the `Sizes` of sequence.cpp."""

    _fields_ = (*((name, ctypes.c_int64) for name in SIZES), ("scale", ctypes.c_double))


@cache
def kernel() -> ctypes.CDLL | NoKernel:
    """sequence.cpp, or why it is not there."""
    loaded = library("sequence")
    if isinstance(loaded, NoKernel):
        return loaded
    loaded.sizes_size.restype = ctypes.c_int64
    assert loaded.sizes_size() == ctypes.sizeof(Sizes)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    loaded.gelu_forward.argtypes = [pointer] * 2 + [number] * 2
    loaded.gelu_backward.argtypes = [pointer] * 3 + [number] * 2
    loaded.attend_forward.argtypes = [pointer] * 7 + [number]
    loaded.attend_backward.argtypes = [pointer] * 11 + [number]
    return loaded


def serves(*tensors: Tensor) -> bool:
    """Whether there is this way for tensors: on a CPU, without forward derivatives, and there is a compiler.

    Not in a compiled graph, which has ways of its own.
    """
    if torch.compiler.is_compiling() or any(x.device.type != "cpu" for x in tensors):
        return False
    if any(unpack_dual(x).tangent is not None for x in tensors):
        return False
    return not isinstance(kernel(), NoKernel)


def _run(name: str, *given: Any) -> None:
    """One call; tensors go as pointers, the number of threads last."""
    loaded = kernel()
    if isinstance(loaded, NoKernel):
        raise loaded
    plain = [t.data_ptr() if isinstance(t, Tensor) else t for t in given]
    getattr(loaded, name)(*plain, torch.get_num_threads())


def _array(t: Tensor) -> Any:
    assert t.shape[3] == 1 or t.stride(3) == 1
    return ctypes.byref(Array(t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)))


def _dense(*tensors: Tensor) -> list[Tensor]:
    """The numbers of a head side by side."""
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
    """Refuses what would be read or written beyond its end."""
    batch, n_query, n_head, width = query.shape
    _, n_key, n_kv, n_value = value.shape
    drawn = 0 if draws is None else draws.shape[-1]
    if key.shape != (batch, n_key, n_kv, width) or len(value) != batch or n_head % n_kv:
        raise ValueError(
            f"queries {query.shape}, keys {key.shape}, values {value.shape} do not fit each other"
        )
    if any(t.dtype != torch.float32 or t.device.type != "cpu" for t in (query, key, value)):
        raise ValueError("queries, keys and values are float32 on a CPU")
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


@torch.library.custom_op("rehead::attend", mutates_args=(), device_types="cpu")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draws: Tensor | None,
    causal: bool,
    window: int,
    dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What queries (B, L, H, E) gather of values (B, S, K, V), and the logarithms of their softmaxes' denominators.

    Causal queries are the last L of S; `window` keys each, 0 for all. `draws` (B, H, L, W), int16, are for the W keys
    from the first that a query sees: where the low 15 bits are below `dropped`, the weight is.
    """
    query, key, value = _dense(query, key, value)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    logs = query.new_empty(query.shape[0], query.shape[2], query.shape[1])
    sizes = _sizes(query, key, value, draws, causal, window, dropped, scale)
    _run("attend_forward", sizes, _array(query), _array(key), _array(value), draws, _array(out), logs)
    return out, logs


@torch.library.custom_op("rehead::attend_backward", mutates_args=(), device_types="cpu")
def attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    draws: Tensor | None,
    out: Tensor,
    logs: Tensor,
    upstream: Tensor,
    causal: bool,
    window: int,
    dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to queries, keys and values."""
    query, key, value, upstream = _dense(query, key, value, upstream)
    grads = [query.new_empty(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape)]
    sizes = _sizes(query, key, value, draws, causal, window, dropped, scale)
    inputs = _array(query), _array(key), _array(value), draws, _array(out), _array(upstream)
    _run("attend_backward", sizes, *inputs, logs, *map(_array, grads))
    return grads[0], grads[1], grads[2]


@torch.library.custom_op("rehead::gelu", mutates_args=(), device_types="cpu")
def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _run("gelu_forward", x, y, x.numel())
    return y


@torch.library.custom_op("rehead::gelu_backward", mutates_args=(), device_types="cpu")
def gelu_backward(x: Tensor, upstream: Tensor) -> Tensor:
    """Its gradient."""
    x, upstream = x.contiguous(), upstream.contiguous()
    to_x = torch.empty_like(x)
    _run("gelu_backward", x, upstream, to_x, x.numel())
    return to_x


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, n_query, n_head, _ = query.shape
    return query.new_empty(batch, n_query, n_head, value.shape[3]), query.new_empty(batch, n_head, n_query)


@attend_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(t.new_empty(t.shape) for t in (query, key, value))


@gelu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@gelu_backward.register_fake
def _(x: Tensor, upstream: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, draws, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, draws, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _back(ctx: Any, upstream: Tensor | None, _logs: Any) -> tuple[Any, ...]:
    if upstream is None:
        return (None,) * 8
    query, key, value, draws, out, logs = ctx.saved_tensors
    grads = attend_backward(query, key, value, draws, out, logs, upstream, *ctx.rest)
    return (*grads, None, None, None, None, None)


attend.register_autograd(_back, setup_context=_keep)


def _gelu_back(ctx: Any, upstream: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # for a second derivative, which PyTorch's own has
        return torch.ops.aten.gelu_backward(upstream, x, approximate="tanh")
    return gelu_backward(x, upstream)


gelu.register_autograd(
    _gelu_back,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
