"""What a model could become, each with a verdict, from the config alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch

from rehead.attention import AttentionConfig
from rehead.attention.grouped_config import divisors
from rehead.config import GPTConfig, ModelConfig
from rehead.conversion.base import CannotConvert, Step, heads_of
from rehead.conversion.export.deepseek import require_alike, require_sayable, stock_target
from rehead.conversion.rotary import require_one_rotation
from rehead.conversion.search import path
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.measure import kv_bytes_per_token
from rehead.measure.kv_dtype import KVDtype
from rehead.measure.size import is_recomputed

Verdict = Literal["present", "exact", "approximate", "impossible", "pointless"]
FRACTIONS = (Fraction(1, 2), Fraction(3, 8), Fraction(1, 4), Fraction(3, 16))

EXPORT = "export --format deepseek_v3"


@dataclass(frozen=True)
class Candidate:
    """A command, and the attention it makes of a layer. If it `exports`, only an exact conversion is possible."""

    command: str
    target: Callable[[AttentionConfig], AttentionConfig]
    exports: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, and the verdict on converting to it. `step` is the conversion whose refusal makes it impossible."""

    command: str
    config: ModelConfig
    verdict: Verdict
    why: str
    step: str = ""

    @property
    def attention(self) -> AttentionConfig | None:
        """The attention of the first layer."""
        return self.config.attention[0] if isinstance(self.config, GPTConfig) else None


def others(config: ModelConfig, kind: torch.dtype | KVDtype = torch.float32) -> Iterator[Variant]:
    """Yield what else the model could be, with a KV cache of this format."""
    if not isinstance(config, GPTConfig):
        state = "" if is_recomputed(config) else ": its state is as large after any number of tokens"
        raise ConfigError(f"a model of type {config.model_type} has no heads to convert{state}.")
    seen = {config.attention}
    for candidate in _candidates(config):
        try:
            targets = {layer: candidate.target(layer) for layer in dict.fromkeys(config.attention)}
        except ConfigError:  # makes no sense for every layer, such as too many heads
            continue
        layers = tuple(targets[layer] for layer in config.attention)
        if layers not in seen:
            seen.add(layers)
            yield _judge(config, replace(config, attention=layers), candidate, kind)


def _candidates(config: GPTConfig) -> Iterator[Candidate]:
    """Yield the targets of `rehead convert`, and the export."""

    def candidate(**fields: Any) -> Candidate:
        command = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
        return Candidate(command, lambda layer: Target(**fields).attention(layer, config.n_embd))

    heads = heads_of(config.attention[0])
    yield candidate(to="mha")
    for n_kv_head in reversed(divisors(heads.n_query_head)[1:-1]):
        yield candidate(to="gqa", n_kv_head=n_kv_head)
    yield candidate(to="mqa")
    yield candidate(to="mla")
    for fraction in map(float, FRACTIONS):
        yield candidate(to="mla", kv_fraction=fraction)
    rotates = any(layer.rope is not None for layer in config.attention)
    for fraction in map(float, FRACTIONS if rotates and _rotate_alike(config) else ()):
        yield candidate(to="mla", target="uneven", kv_fraction=fraction)
    if rotates:
        yield candidate(to="mla", target="canonical")
    yield candidate(to="reduced")
    yield Candidate(EXPORT, lambda layer: stock_target(layer, config.n_embd), exports=True)


def _rotate_alike(config: GPTConfig) -> bool:
    try:
        require_one_rotation(config.attention)
    except ConfigError:
        return False
    return True


def _judge(
    source: GPTConfig, result: GPTConfig, candidate: Candidate, kind: torch.dtype | KVDtype
) -> Variant:
    """Judge the conversion to `result`. One that does not shrink the cache is pointless, whatever its scales take."""
    before, after = (kv_bytes_per_token(config, kind) for config in (source, result))
    fewer = sum(layer.kv_numbers() for layer in result.attention) < sum(
        layer.kv_numbers() for layer in source.attention
    )

    def judged(verdict: Verdict, why: str, step: str = "") -> Variant:
        return Variant(command=candidate.command, config=result, verdict=verdict, why=why, step=step)

    try:
        if candidate.exports:
            require_sayable(source)
            require_alike(result.attention)
        pairs = dict.fromkeys(zip(source.attention, result.attention, strict=True))  # most layers are alike
        paths = [path(old, new, source.n_embd) for old, new in pairs]
    except CannotConvert as error:
        return judged("impossible", error.reason, error.step)
    steps = [step for steps in paths for step in steps]
    exact = all(step.promise.exact for step in steps)
    if after >= before or not fewer:
        kept = "exact, but " if exact else ""
        size = f"{share(after, before)} of the present cache"
        scales = ", in which only scales are fewer" * (after < before)
        return judged("pointless", f"{kept}{size}{scales}")
    if candidate.exports and not exact:
        return judged("impossible", "its KV heads rotate in ways of their own")
    if any(
        step.result.kv_numbers() < new.kv_numbers()
        for steps, (_, new) in zip(paths, pairs, strict=True)
        for step in steps
    ):
        return judged(
            "pointless",
            "its heads would be copies: fewer KV heads are the same model with a smaller cache",
        )
    reasons = dict.fromkeys(why for steps in paths for why in _reasons(steps, exact))
    return judged("exact" if exact else "approximate", "; ".join(reasons))


def _reasons(steps: list[Step], exact: bool) -> list[str]:
    """Return why the steps are exact; if some are not, the reasons of all up to the last approximation."""
    last = max((place for place, step in enumerate(steps) if step.promise.exact == exact), default=-1)
    return [step.promise.why for step in steps[: last + 1]]


def share(after: int, before: int) -> str:
    """Return a size as a percentage of another."""
    percent = 100 * after / before
    return f"{percent:,.0f} %" if percent >= 1000 else f"{percent:.4g} %"
