"""Checks the arguments of an attention call.

The checks read only shapes, dtypes, devices and types, never values: every `forward` runs them, also in decoding.
"""

from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rehead.attention.cache import LayerCache
from rehead.errors import InvalidInput, UsageError

if TYPE_CHECKING:
    from rehead.attention.base import AttentionConfig

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
"""The dtypes that positions may have."""


def require_call(
    config: "AttentionConfig",
    d_model: int,
    weight: Tensor,
    x: Tensor,
    context: Tensor | None,
    positions: Tensor | None,
    cache: object,
    context_positions: Tensor | None,
) -> None:
    """Refuse calls that would fail halfway or silently compute something else."""
    _require_x(x, d_model)
    _require_dtype("x", x, weight)
    if context is not None:
        _require_context(config, context, d_model, len(x))
        _require_dtype("context", context, weight)
    elif config.d_context is not None:
        raise UsageError(
            f"this attention reads a context of width d_context={config.d_context}: call it as "
            "module(x, context)."
        )
    if positions is not None:
        require_positions("positions", positions, x)
    if context_positions is not None:
        if context is None:
            raise UsageError(
                f"context_positions of shape {tuple(context_positions.shape)} without a context: they are the "
                "positions of its tokens. Use positions for those of x."
            )
        require_positions("context_positions", context_positions, context, "(B, S)")
    if cache is not None:
        _require_cache(config, cache, x)


def _require_x(x: Tensor, d_model: int) -> None:
    if x.dim() != 3:
        raise UsageError(
            f"x has shape {tuple(x.shape)}: an attention reads (B, L, D). Use x[None] for one text."
        )
    if x.shape[2] != d_model:
        raise UsageError(
            f"x has width {x.shape[2]}: this attention was built for d_model={d_model}. Use x of that width, "
            f"or build it with d_model={x.shape[2]}."
        )
    if not x.shape[1]:
        raise UsageError(f"x has shape {tuple(x.shape)}: it has no tokens. Give at least one token per row.")


def _require_dtype(name: str, given: Tensor, weight: Tensor) -> None:
    """Refuse a dtype that torch cannot multiply by the weights'; under autocast, floating dtypes may differ."""
    if given.dtype == weight.dtype or not weight.is_floating_point():
        return
    if given.is_floating_point() and torch.is_autocast_enabled(given.device.type):
        return
    alternatives = f", attention.to({given.dtype}), or torch.autocast" if given.is_floating_point() else ""
    raise InvalidInput(
        f"{name} is {given.dtype}, the weights of this attention are {weight.dtype}: they must match. Use "
        f"{name}.to({weight.dtype}){alternatives}."
    )


def _require_context(config: "AttentionConfig", context: Tensor, d_model: int, n_row: int) -> None:
    if config.causal:
        raise UsageError(
            "context given to a causal attention: queries and keys of two sequences have no common "
            "order. Build it with causal=False."
        )
    if context.dim() != 3:
        raise UsageError(
            f"context has shape {tuple(context.shape)}: an attention reads (B, S, C). Use context[None] for "
            "one text."
        )
    width = config.d_context or d_model
    if context.shape[2] != width:
        raise UsageError(
            f"context has width {context.shape[2]}: this attention reads d_context={width}. Use a context of "
            f"that width, or build it with d_context={context.shape[2]}."
        )
    if len(context) != n_row:
        raise UsageError(
            f"context is a batch of {len(context)} and x a batch of {n_row}: each row of x has its own. Use "
            f"context[:1].expand({n_row}, -1, -1) to share the first."
        )


def require_positions(name: str, given: Tensor, of: Tensor, letters: str = "(B, L)") -> None:
    """Refuse anything but one whole number for each token in `of`, (B, L, ...), or for each of one row."""
    if given.dtype not in WHOLE:
        raise UsageError(
            f"{name} are {given.dtype}: positions are whole numbers. Use {name}.long() or, if it is a mask of "
            "what is no padding, torch.where(mask.bool(), mask.long().cumsum(1) - 1, -1)."
        )
    n_row, n_token = of.shape[:2]
    if given.dim() != 2 or given.shape[0] not in (1, n_row) or given.shape[1] != n_token:
        raise UsageError(
            f"{name} have shape {tuple(given.shape)}: one for each token, {letters}. Use "
            f"{(n_row, n_token)}, or {(1, n_token)} where all rows are alike."
        )


def _require_cache(config: "AttentionConfig", cache: object, x: Tensor) -> None:
    if not config.causal:
        raise UsageError(
            "a KV cache needs causal=True: without it, earlier tokens would have to see later ones."
        )
    if not isinstance(cache, LayerCache):
        raise UsageError(
            f"cache is a {type(cache).__name__}: a layer's cache is a LayerCache. Build it with "
            "attention.config.cache(batch_size)."
        )
    require_fits(cache, config, x)


def require_sizes(batch_size: int, capacity: int | None) -> None:
    """Refuse a cache of no whole number of sequences, or of less than a token."""
    for name, size, least in (("batch_size", batch_size, 0), ("capacity", capacity, 1)):
        if size is not None and (not isinstance(size, Integral) or size < least):
            raise UsageError(f"{name}={size!r:.40}: a cache has a whole number of them. Use {least} or more.")


def require_fits(cache: LayerCache, config: "AttentionConfig", x: Tensor) -> None:
    """Refuse a cache of a layer with other rows or another window, or of another batch, dtype or device than `x`.

    Under autocast the cache may have a wider dtype than the computation.
    """
    rows, dtype = config.cache_rows(), x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.promote_types(cache.dtype, torch.get_autocast_dtype(x.device.type))
    if cache.rows != rows:
        fault = f"keeps {cache.rows} of a token and the layer {dict(rows)}", "attention.config.cache"
    elif cache.window != config.window:
        keeps, sees = (
            f"the last window={n} tokens" if n else "all tokens" for n in (cache.window, config.window)
        )
        fault = f"keeps {keeps} and the layer sees {sees}", "attention.config.cache"
    elif cache.batch_size != len(x):
        fault = f"holds batch_size={cache.batch_size} sequences and x has {len(x)}", f"batch_size={len(x)}"
    elif cache.dtype != dtype:
        fault = f"keeps {cache.dtype} and the layer computes {dtype}", f"dtype={dtype}"
    elif cache.device != x.device:
        fault = f"is on {cache.device} and x on {x.device}", f"device={str(x.device)!r}"
    else:
        return
    raise UsageError(
        f"this KV cache {fault[0]}: it belongs to another layer or call. Build it with {fault[1]}."
    )
