"""The caches of all layers together: checked before the first of them changes, and as they were after a failure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from rehead.attention import AttentionConfig, LayerCache
from rehead.attention.call import require_fits
from rehead.errors import UsageError
from rehead.model.state import StateCache


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
        require_fits(cache, kind, x)


def require_next(
    caches: Sequence[LayerCache], batch_size: int, length: int, positions: Tensor | None = None
) -> None:
    """Refuse caches that do not hold the same tokens of `batch_size` sequences, or have no room for `length`.

    Refuse tokens at given `positions`, (#B, L), that a ring cannot take.
    """
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
        if positions is not None:
            cache.require_kept(positions)


@contextmanager
def counted(caches: object, positions: Tensor | None = None) -> Iterator[None]:
    """Take back from all caches, if the block fails, the tokens that it counted, or that an RNN's states have read.

    `positions`, (#B, L), are those of its tokens, where these do not simply follow the ones counted.
    """
    given = caches if isinstance(caches, list | tuple) else ()
    counts = [(cache, cache.count) for cache in given if isinstance(cache, LayerCache)]
    states = [(cache, cache.state) for cache in given if isinstance(cache, StateCache)]
    try:
        yield
    except BaseException:
        for layer, state in states:
            layer.state = state
        for cache, count in counts:
            cache.take_back(count, positions)
        raise
