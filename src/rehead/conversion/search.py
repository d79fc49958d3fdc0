"""Search: the sequence of conversions from one attention to another that loses least."""

import heapq
from dataclasses import fields, replace
from itertools import count
from typing import Any

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.attention.score import ScaledDot
from rehead.conversion.base import CannotConvert, Conversion, Step, conversions, starts_from
from rehead.conversion.steps.latent import full_rank, rank_on_the_way

NARROWEST = -(10**18)
"""Negated numbers per token of a path without any approximation so far."""
MOST_OBSTACLES = 3
"""Obstacles that a message names, at most."""
NORMED = "a norm on its latent (latent_norm=True)"
STAYS = "Keep it as it is: it can be run, measured and exported."
KEPT = ("n_query_head", "causal", "window", "d_context", "attn_pdrop", "score")
"""Fields that no conversion changes."""


def path(source: AttentionConfig, target: AttentionConfig, d_model: int) -> list[Step]:
    """Return the steps from `source` to `target`: exact ones, or the approximate ones that should lose least.

    These are the ones whose smallest cache after an approximation is largest; ties are broken by the fewest
    approximations, then by the fewest steps. Raises CannotConvert, with the obstacle, if there is no path.
    """
    order = count()
    frontier: list[tuple[int, int, int, int, AttentionConfig, list[Step]]] = [
        (NARROWEST, 0, 0, next(order), source, [])
    ]
    done: dict[AttentionConfig, int] = {}  # with how many approximations
    while frontier:
        narrowest, approximate, _, _, config, steps = heapq.heappop(frontier)
        if config == target:
            return steps
        if approximate >= done.get(config, approximate + 1):
            continue
        done[config] = approximate
        for name, conversion in _starting(config, target):
            if conversion.refusal(config):
                continue
            for result in conversion.steps(config, target, d_model):
                promise = conversion.promise(config, result, d_model)
                step = Step(name=name, source=config, result=result, promise=promise)
                lossy = approximate + (not promise.exact)
                least = narrowest if promise.exact else max(narrowest, -result.kv_numbers())
                way = (least, lossy, len(steps) + 1, next(order), result, [*steps, step])
                heapq.heappush(frontier, way)
    obstacles = _obstacles(source, target, set(done), d_model)
    texts = [f"{step}: {why}" if step else why for step, why in obstacles[:MOST_OBSTACLES]]
    message, reason = (
        f"no conversion leads from {source.name} to {_called(target)}: {'; '.join(texts)}.",
        texts[0],
    )
    has_scores = type(getattr(source, "score", ScaledDot())) is not ScaledDot
    if obstacles[0][0] and has_scores and isinstance(target, LatentConfig):
        fewer = " Use --to mqa, or fewer KV heads with --to gqa." if _has_fewer(source, d_model) else ""
        message = f"{obstacles[0][1]}.{fewer}"
    if isinstance(source, LatentConfig) and source.latent_norm and obstacles[0][0]:
        message, reason = f"an MLA with {NORMED} cannot be narrowed or expanded. {STAYS}", NORMED
    raise CannotConvert(message, reason=reason, step=obstacles[0][0])


def _called(target: AttentionConfig) -> str:
    """Return what messages call a target."""
    return "the reduced form of a latent" if getattr(target, "tie_kv", False) else target.name


def _starting(source: AttentionConfig, target: AttentionConfig) -> list[tuple[str, Conversion[Any, Any]]]:
    """Return the conversions that take `source` and can be a step towards `target`."""
    kind = type(source)
    found = [(name, conversions[name]()) for name in conversions if starts_from(conversions[name], kind)]
    return [(name, one) for name, one in found if one.serves(target)]


def _obstacles(
    source: AttentionConfig, target: AttentionConfig, reached: set[AttentionConfig], d_model: int
) -> list[tuple[str, str]]:
    """Return why there is no path: pairs of the refusing conversion, if any, and its reason; the source's first."""
    if not any(starts_from(conversions[name], type(source)) for name in conversions):
        return [("", "no conversion starts from it. Keep it as it is")]
    start, source = source, source.equivalent()
    there = {field.name: getattr(target, field.name) for field in fields(target)}
    for name in KEPT:
        if name in there and getattr(source, name, there[name]) != there[name]:
            return [("", f"{_change(source, name, there)}. Keep it, or train a new model")]
    tied = getattr(source, "tie_kv", False) or there.get("tie_kv", False)
    on_the_way = [config for config in reached if tied or not getattr(config, "tie_kv", False)]
    refused = {
        (config not in (start, source), name, why)
        for config in on_the_way
        for name, conversion in _starting(config, target)
        if (why := conversion.refusal(config))
    }
    if refused:
        return list(dict.fromkeys((name, why) for _, name, why in sorted(refused)))
    if isinstance(source, GroupedConfig) and rank_on_the_way(target) > full_rank(source, d_model):
        full = full_rank(source, d_model)
        hold = f"{full} numbers hold all its keys and values, {rank_on_the_way(target)} would hold zeros"
        return [("", hold)]

    def likeness(config: AttentionConfig) -> int:
        return sum(getattr(config, name, None) == value for name, value in there.items())

    nearest = max(on_the_way, key=lambda config: (type(config) is type(target), likeness(config)))
    changes = (
        _change(nearest, name, there)
        for name, value in there.items()
        if getattr(nearest, name, None) != value
    )
    return [("", next(changes, "it is the same"))]


def _has_fewer(source: AttentionConfig, d_model: int) -> bool:
    """Whether a conversion leads to MQA from there."""
    if not isinstance(source, GroupedConfig) or source.n_kv_head == 1:
        return False
    try:
        path(source, replace(source, n_kv_head=1), d_model)
    except CannotConvert:
        return False
    return True


def _change(config: AttentionConfig, name: str, there: dict[str, object]) -> str:
    """Say that a field cannot take another value."""
    return f"{name}={getattr(config, name, None)!r:.120} cannot become {there[name]!r:.120}"
