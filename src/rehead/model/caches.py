"""Checks the KV caches of all layers together, before the first of them changes."""

from collections.abc import Sequence

from torch import Tensor

from rehead.attention import AttentionConfig, LayerCache
from rehead.errors import UsageError


def require_caches(caches: object, kinds: Sequence[AttentionConfig], x: Tensor) -> None:
    """Refuse anything but one cache per layer, fit for the layer's config in `kinds` and for `x`, (B, L, D)."""
    if not isinstance(caches, list | tuple):
        raise UsageError(
            f"cache is a {type(caches).__name__}: expected a list of KV caches. Use model.new_cache(batch_size)."
        )
    if len(caches) != len(kinds):
        raise UsageError(f"{len(caches)} caches for {len(kinds)} layers. Use model.new_cache(batch_size).")
    owner: dict[int, int] = {}
    for layer, (cache, kind) in enumerate(zip(caches, kinds, strict=True)):
        if not isinstance(cache, LayerCache):
            raise UsageError(
                f"the cache of layer {layer} is a {type(cache).__name__}: expected a LayerCache. Use "
                "model.new_cache(batch_size)."
            )
        if (other := owner.setdefault(id(cache), layer)) != layer:
            raise UsageError(
                f"layers {other} and {layer} were given the same KV cache: each keeps its own tokens. Use "
                "model.new_cache(batch_size)."
            )
        cache.require_fits(kind.cache_rows(), kind.window, x)


def require_next(caches: Sequence[LayerCache], batch_size: int, length: int) -> None:
    """Refuse caches that do not hold the same tokens of `batch_size` sequences, or have no room for `length`."""
    first = caches[0]
    n_token, is_consecutive = first.n_token, first.positions is None
    for layer, cache in enumerate(caches):
        if cache.n_token != n_token or (cache.positions is None) != is_consecutive:
            raise UsageError(
                f"the KV caches are out of step: layer 0's holds {n_token} tokens and layer {layer}'s {cache.n_token}, "
                "or other positions. Pass all caches of one model.new_cache(batch_size) to every call."
            )
        if cache.batch_size != batch_size:
            raise UsageError(
                f"the KV cache of layer {layer} holds {cache.batch_size} sequences and the call has {batch_size}. "
                "Give one id for each sequence, and call select_batch of every layer's cache alike."
            )
        if cache.capacity is not None:
            cache.require_room(length)
