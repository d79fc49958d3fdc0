"""What each variant would cost, and what becoming it would be, from the config alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import torch

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.attention.grouped_config import divisors
from rehead.config import ExpertsConfig, GPTConfig, ModelConfig, RNNConfig
from rehead.config.model import LARGEST
from rehead.conversion.base import CannotConvert, Step, heads_of, summary
from rehead.conversion.export.deepseek import require_sayable, stock_target
from rehead.conversion.search import path
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.measure import cache_bytes, kv_bytes_per_token, parameters
from rehead.measure.parts import Parts, parts
from rehead.measure.size import active_parameters, decode_bytes, decode_flops

MOST_SEQUENCES = 1 << 20
"""Decoded at once, in a plan; more is a slip of the keys."""
Verdict = Literal["present", "exact", "approximate", "impossible", "pointless"]
FRACTIONS = (Fraction(1, 2), Fraction(3, 8), Fraction(1, 4), Fraction(3, 16))

EXPORT = "export --format deepseek_v3"
REBUILDING = (
    "Rebuilt keys save memory, not time: every step reads R numbers per past token and layer and multiplies "
    "them into all keys and values."
)
DECOUPLED = (
    "uneven: some directions of the keys keep their rotation, the others lose it, so that nothing is rebuilt: far "
    "fewer FLOPs than rebuilt keys, a larger loss, and a class that transformers has."
)
TIED = (
    "tied: keys and values are the same numbers, cached once, as in the reduced form of MLA (--to reduced)."
)


@dataclass(frozen=True)
class Candidate:
    """A command, and the attention it makes of a layer. One that `exports` takes no approximation."""

    command: str
    target: Callable[[AttentionConfig], AttentionConfig]
    exports: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model, and what becoming it would be. `step` is the conversion that would have to be possible."""

    command: str
    config: ModelConfig
    verdict: Verdict
    why: str
    step: str = ""

    @property
    def attention(self) -> AttentionConfig | None:
        """The attention of the first layer."""
        return self.config.attention[0] if isinstance(self.config, GPTConfig) else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. Bytes are those of the planned dtype; FLOPs and read bytes of one decode step.

    `active_parameters` are those that one token uses, which are fewer where there are experts.

    `layer` is what the first layer's attention is made of, over the whole context; None without
    attention.
    """

    variant: str
    command: str
    parameters: int
    active_parameters: int
    kv_bytes_per_token: int
    cache_bytes: int
    decode_flops: int
    decode_bytes: int
    layer: Parts | None
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All variants, the present one first, which of them to choose, and what is to be known about them."""

    context: int
    batch_size: int
    dtype: str
    rows: list[Row]
    advice: str
    notes: list[str]


def plan(config: ModelConfig, context: int, batch_size: int = 1, dtype: torch.dtype = torch.float32) -> Plan:
    """Return every variant of `config` at a context length.

    A model without heads, or with an attention that no conversion takes, gets one row, and the reason as advice.
    """
    for name, size, largest in (
        ("context", context, LARGEST["block_size"]),
        ("batch", batch_size, MOST_SEQUENCES),
    ):
        if not 1 <= size <= largest:
            raise ConfigError(f"{name}={size}. Use 1 to {largest:,}.")

    variants = [Variant(command="", config=config, verdict="present", why="")]
    refused = ""
    try:
        variants += _others(config)
    except ConfigError as error:
        refused = str(error)
    rows = [_row(variant, context, batch_size, dtype) for variant in variants]
    return Plan(
        context=context,
        batch_size=batch_size,
        dtype=str(dtype).removeprefix("torch."),
        rows=rows,
        advice=refused or _advice(rows, variants),
        notes=list(_notes(variants, context)),
    )


def _row(variant: Variant, context: int, batch_size: int, dtype: torch.dtype) -> Row:
    config, layer = variant.config, variant.attention
    return Row(
        variant=_name(config),
        command=variant.command,
        parameters=parameters(config),
        active_parameters=active_parameters(config),
        kv_bytes_per_token=kv_bytes_per_token(config, dtype),
        cache_bytes=cache_bytes(config, context, batch_size, dtype),
        decode_flops=decode_flops(config, context) * batch_size,
        decode_bytes=decode_bytes(config, context, batch_size, dtype),
        layer=None if layer is None else parts(layer, config.n_embd, context),
        verdict=variant.verdict,
        why=variant.why,
    )


def _name(config: ModelConfig) -> str:
    if isinstance(config, GPTConfig):
        return config.attention[0].describe()
    assert isinstance(config, RNNConfig)
    return f"rnn, a state of {config.n_layer} x {config.n_hidden}"


def _others(config: ModelConfig) -> Iterator[Variant]:
    """Yield what else the model could be."""
    if not isinstance(config, GPTConfig):
        raise ConfigError(
            f"a model of type {config.model_type} has no heads to convert: its state is as large after any number of "
            "tokens."
        )
    seen = {config.attention}
    for candidate in _candidates(config):
        try:
            layers = tuple(candidate.target(layer) for layer in config.attention)
        except ConfigError:  # not to be meant of every layer, such as a head too many
            continue
        if layers not in seen:
            seen.add(layers)
            yield _judge(config, replace(config, attention=layers), candidate)


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
    for fraction in map(float, FRACTIONS if heads.rope is not None else ()):
        yield candidate(to="mla", target="uneven", kv_fraction=fraction)
    yield candidate(to="reduced")
    yield Candidate(EXPORT, lambda layer: stock_target(layer, config.n_embd), exports=True)


def _judge(source: GPTConfig, result: GPTConfig, candidate: Candidate) -> Variant:
    """Judge the conversion to `result`. One that does not shrink the cache is pointless."""
    before, after = (kv_bytes_per_token(config) for config in (source, result))

    def judged(verdict: Verdict, why: str, step: str = "") -> Variant:
        return Variant(command=candidate.command, config=result, verdict=verdict, why=why, step=step)

    try:
        if candidate.exports:
            require_sayable(source)
        paths = [
            path(old, new, source.n_embd) for old, new in zip(source.attention, result.attention, strict=True)
        ]
    except CannotConvert as error:
        return judged("impossible", error.reason, error.step)
    steps = [step for steps in paths for step in steps]
    exact = all(step.promise.exact for step in steps)
    if after >= before:
        kept = "exact, but " if exact else ""
        return judged("pointless", f"{kept}{_share(after, before)} of the present cache")
    if candidate.exports and not exact:
        return judged("impossible", "its KV heads rotate in ways of their own")
    if any(
        step.result.kv_numbers() < new.kv_numbers()
        for steps, new in zip(paths, result.attention, strict=True)
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


def _share(after: int, before: int) -> str:
    return f"{100 * after / before:.0f} %"


def _advice(rows: list[Row], variants: list[Variant]) -> str:
    """Recommend the smallest exact cache or, without one, the largest approximate latent."""
    exact = [row for row in rows if row.verdict == "exact"]
    lossy = [
        (row, isinstance(variant.attention, LatentConfig))
        for row, variant in zip(rows, variants, strict=True)
        if row.verdict == "approximate"
    ]
    if exact:
        best = min(exact, key=lambda row: (row.cache_bytes, row.parameters))
        share = _share(best.kv_bytes_per_token, rows[0].kv_bytes_per_token)
        return f"{best.command} keeps every logit and {share} of the cache."
    if lossy:
        latents = (row for row, latent in lossy if latent)
        best = max(latents, key=lambda row: row.cache_bytes, default=lossy[0][0])
        return f"Nothing smaller is exact. {best.command} usually loses least; measure it with --calibration TEXT."
    return "Nothing smaller can be made of this model: keep it as it is."


def _notes(variants: list[Variant], context: int) -> Iterator[str]:
    """Yield what a reader of the rows needs: the meaning of their words, and the context the model was made for."""
    layers = [variant.attention for variant in variants]
    if any(isinstance(layer, LatentConfig) and layer.rebuilds_keys for layer in layers):
        yield REBUILDING
    if any("uneven" in variant.command for variant in variants):
        yield DECOUPLED
    if any(isinstance(layer, GroupedConfig) and layer.tie_kv for layer in layers):
        yield TIED
    for step in dict.fromkeys(variant.step for variant in variants if variant.step):
        yield f"{step}: {summary(step)}"
    config = variants[0].config
    if isinstance(config, GPTConfig) and config.experts is not None:
        yield _of_experts(config, config.experts)
    limit = config.context_limit
    if limit is not None and context > limit:
        yield (
            f"The model was made for {limit:,} tokens: with a context of {context:,} the figures are those of a model "
            "trained for that many."
        )


def _of_experts(config: GPTConfig, experts: ExpertsConfig) -> str:
    return (
        f"{len(experts.layers)} of {config.n_layer} layers have {experts.n_routed_experts} experts; a token uses "
        f"{experts.num_experts_per_tok}: {active_parameters(config):,} of {parameters(config):,} parameters. FLOPs "
        "and bytes read are of these; a larger batch reads more experts. Conversions copy them as they are."
    )
