"""Conversions in a row: the way from one attention to another that loses least."""

import heapq
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

from rehead.attention import AttentionConfig
from rehead.conversion.base import Conversion, Step, conversions
from rehead.errors import ConfigError

KEPT = ("n_query_head", "causal", "window", "d_context", "attn_pdrop", "score")
"""What no conversion changes."""


def path(source: AttentionConfig, target: AttentionConfig, d_model: int) -> list[Step]:
    """The steps from `source` to `target`: fewest approximations, then fewest steps.

    Of ways alike in that, one that squeezes the cache least on its way. Raises ConfigError where
    there is none, saying what stands in between.
    """
    order = count()
    frontier: list[tuple[int, int, int, int, AttentionConfig, list[Step]]] = [
        (0, 0, 0, next(order), source, [])
    ]
    done: set[AttentionConfig] = set()
    while frontier:
        approximate, _, narrowest, _, config, steps = heapq.heappop(frontier)
        if config == target:
            return steps
        if config in done:
            continue
        done.add(config)
        for name, conversion in _usable(config):
            for result in conversion.steps(config, target, d_model):
                promise = conversion.promise(config, result, d_model)
                step = Step(name=name, source=config, result=result, promise=promise)
                lossy = approximate + (not promise.exact)
                least = narrowest if promise.exact else max(narrowest, -result.kv_numbers())
                way = (lossy, len(steps) + 1, least, next(order), result, [*steps, step])
                heapq.heappush(frontier, way)
    stands = _obstacle(source, target, done)
    raise ConfigError(f"no conversion leads from {source.name} to {target.name}: {stands}")


def _usable(source: AttentionConfig) -> list[tuple[str, Conversion[Any, Any]]]:
    """The conversions that can start from `source`."""
    found = [(name, conversions[name]()) for name in conversions]
    return [(name, one) for name, one in found if isinstance(source, one.takes) and not one.refusal(source)]


def _refused(source: AttentionConfig) -> list[str]:
    found = [(name, conversions[name]()) for name in conversions]
    pairs = [(name, one.refusal(source)) for name, one in found if isinstance(source, one.takes)]
    return [f"{name}: {text}" for name, text in pairs if text]


def _obstacle(source: AttentionConfig, target: AttentionConfig, reached: set[AttentionConfig]) -> str:
    """Why there is no way, as far as the conversions can say."""
    if refused := {text for config in reached for text in _refused(config)}:
        return f"{'; '.join(sorted(refused))}."
    there = {field.name: getattr(target, field.name) for field in fields(target)}
    for name in KEPT:
        if name in there and hasattr(source, name) and getattr(source, name) != there[name]:
            return (
                f"{name}={_short(getattr(source, name))} cannot become {_short(there[name])}. Keep it, or "
                "train a new model."
            )
    for name, wanted in there.items():
        if hasattr(source, name) and getattr(source, name) != wanted:
            return f"{name}={_short(getattr(source, name))} cannot become {_short(wanted)}."
    return f"it would need {_short(target)}."


def _short(value: object) -> str:
    return type(value).__name__ if is_dataclass(value) else repr(value)
