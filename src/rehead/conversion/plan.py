"""What each variant would cost, and what becoming it would be, from the config alone."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch

from rehead.attention import AttentionConfig, LatentConfig
from rehead.attention.grouped import divisors
from rehead.config import GPTConfig, ModelConfig, RNNConfig
from rehead.conversion.base import CannotConvert, heads_of
from rehead.conversion.export.deepseek import require_sayable, stock_target
from rehead.conversion.search import path
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.measure import cache_bytes, kv_bytes_per_token, parameters
from rehead.measure.parts import Parts, parts
from rehead.measure.size import decode_bytes, decode_flops

Verdict = Literal["present", "exact", "approximate", "impossible", "pointless"]
FRACTIONS = (Fraction(1, 2), Fraction(3, 8), Fraction(1, 4), Fraction(3, 16))


EXPORT = "export --format deepseek_v3"
REBUILDING = (
    "Rebuilt keys save memory, not time: every step reads R numbers per past token and layer and multiplies "
    "them into all keys and values."
)


@dataclass(frozen=True)
class Candidate:
    """A command, and the attention it makes of a layer. One that `exports` takes no approximation."""

    command: str
    target: Callable[[AttentionConfig], AttentionConfig]
    exports: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. Bytes are those of the planned dtype; FLOPs and read bytes of one decode step.

    `layer` is what the first layer's attention is made of, over the whole context; None without
    attention.
    """

    variant: str
    command: str
    parameters: int
    kv_bytes_per_token: int
    cache_bytes: int
    decode_flops: int
    decode_bytes: int
    layer: Parts | None
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All variants, the present one first, and which of them to choose."""

    context: int
    batch_size: int
    dtype: str
    rows: list[Row]
    advice: str


def plan(config: ModelConfig, context: int, batch_size: int = 1, dtype: torch.dtype = torch.float32) -> Plan:
    """Every variant of `config` at a context length; of a model without heads, or with heads that no conversion
    knows, itself alone, with the reason.
    """
    for name, size in (("context", context), ("batch", batch_size)):
        if size < 1:
            raise ConfigError(f"{name}={size}. Use 1 or more.")

    def row(command: str, changed: ModelConfig, verdict: Verdict, why: str) -> Row:
        return Row(
            variant=_variant(changed),
            command=command,
            parameters=parameters(changed),
            kv_bytes_per_token=kv_bytes_per_token(changed, dtype),
            cache_bytes=cache_bytes(changed, context, batch_size, dtype),
            decode_flops=decode_flops(changed, context) * batch_size,
            decode_bytes=decode_bytes(changed, context, batch_size, dtype),
            layer=_layer(changed, context),
            verdict=verdict,
            why=why,
        )

    variants: list[tuple[str, ModelConfig, Verdict, str]] = [("", config, "present", "")]
    refused = ""
    try:
        variants += _others(config)
    except ConfigError as error:
        refused = str(error)
    rows, latents = [row(*one) for one in variants], [_latent(one) for _, one, _, _ in variants]
    rebuilds = any(latent is not None and latent.rebuilds_keys for latent in latents)
    return Plan(
        context=context,
        batch_size=batch_size,
        dtype=str(dtype).removeprefix("torch."),
        rows=rows,
        advice=(refused or _advice(rows, latents)) + (f" {REBUILDING}" if rebuilds else ""),
    )


def _variant(config: ModelConfig) -> str:
    if isinstance(config, GPTConfig):
        return config.attention[0].describe()
    assert isinstance(config, RNNConfig)
    return f"rnn, a state of {config.n_layer} x {config.n_hidden}"


def _latent(config: ModelConfig) -> LatentConfig | None:
    """The first layer's attention, if it is MLA."""
    first = config.attention[0] if isinstance(config, GPTConfig) else None
    return first if isinstance(first, LatentConfig) else None


def _layer(config: ModelConfig, context: int) -> Parts | None:
    return parts(config.attention[0], config.n_embd, context) if isinstance(config, GPTConfig) else None


def _others(config: ModelConfig) -> Iterator[tuple[str, GPTConfig, Verdict, str]]:
    """What else the model could be: the command, the result, and what becoming it would be."""
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
            changed = replace(config, attention=layers)
            yield candidate.command, changed, *_judge(config, changed, candidate)


def _candidates(config: GPTConfig) -> Iterator[Candidate]:
    """Flags of `rehead convert`, and the export."""

    def candidate(**fields: object) -> Candidate:
        command = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in fields.items())
        return Candidate(command, lambda layer: Target(**fields).attention(layer, config.n_embd))  # type: ignore[arg-type]

    heads = heads_of(config.attention[0])
    yield candidate(to="mha")
    for n_kv_head in reversed(divisors(heads.n_query_head)[1:-1]):
        yield candidate(to="gqa", n_kv_head=n_kv_head)
    yield candidate(to="mqa")
    yield candidate(to="mla")
    for fraction in map(float, FRACTIONS):
        yield candidate(to="mla", kv_fraction=fraction)
    yield candidate(to="reduced")
    yield Candidate(EXPORT, lambda layer: stock_target(layer, config.n_embd), exports=True)


def _judge(source: GPTConfig, result: GPTConfig, candidate: Candidate) -> tuple[Verdict, str]:
    """What becoming `result` would be. A conversion that does not shrink the cache is pointless."""
    before, after = (kv_bytes_per_token(config) for config in (source, result))
    try:
        if candidate.exports:
            require_sayable(source)
        paths = [
            path(old, new, source.n_embd) for old, new in zip(source.attention, result.attention, strict=True)
        ]
    except CannotConvert as error:
        if after > before:
            return "pointless", f"{_share(after, before)} of the present cache"
        return "impossible", error.reason
    steps = [step for steps in paths for step in steps]
    exact = all(step.promise.exact for step in steps)
    if after >= before:
        kept = "exact, but " if exact else ""
        return "pointless", f"{kept}{_share(after, before)} of the present cache"
    if candidate.exports and not exact:
        return "impossible", "its KV heads rotate in ways of their own"
    if any(
        step.result.kv_numbers() < new.kv_numbers()
        for steps, new in zip(paths, result.attention, strict=True)
        for step in steps
    ):
        return (
            "pointless",
            "its heads would be copies: fewer KV heads are the same model with a smaller cache",
        )
    why = "; ".join(dict.fromkeys(step.promise.why for step in steps if step.promise.exact == exact))
    return ("exact" if exact else "approximate"), why


def _share(after: int, before: int) -> str:
    return f"{100 * after / before:.0f} %"


def _advice(rows: list[Row], latents: list[LatentConfig | None]) -> str:
    """The smallest cache that costs nothing; where there is none, a latent of the largest."""
    exact = [row for row in rows if row.verdict == "exact"]
    lossy = [row for row in rows if row.verdict == "approximate"]
    if exact:
        best = min(exact, key=lambda row: (row.cache_bytes, row.parameters))
        share = _share(best.kv_bytes_per_token, rows[0].kv_bytes_per_token)
        return f"{best.command} keeps every logit and {share} of the cache."
    if lossy:
        wide = [row for row, latent in zip(rows, latents, strict=True) if latent is not None and row in lossy]
        best = max(wide, key=lambda row: row.cache_bytes, default=lossy[0])
        return f"Nothing smaller is exact. {best.command} usually loses least; measure it with --calibration TEXT."
    return "Nothing smaller can be made of this model: keep it as it is."
