"""Which stock class can hold a model, from its config alone, and the ways out where the one asked for cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.checkpoint import Family, families
from rehead.checkpoint.gguf.architectures import architectures
from rehead.checkpoint.huggingface import stock
from rehead.checkpoint.huggingface.decoder import LLAMA
from rehead.config import GPTConfig, ModelConfig
from rehead.conversion.base import common
from rehead.conversion.export.computed import require_computed
from rehead.conversion.export.deepseek import deepseek_layers
from rehead.conversion.export.engines import Engine, require_served
from rehead.conversion.search import path
from rehead.conversion.target import Kind, Target
from rehead.errors import ConfigError

DEEPSEEK = "deepseek_v3"
KEPT = "use it with rehead (generate, eval)"
"""The way out of a model that no class can hold."""
ANY = "--for transformers"
SERVERS: tuple[Engine, ...] = ("vllm", "sglang")
"""Engines with kernels for MLA, which serve `--target canonical`."""
AS_GGUF = {"mistral": "llama"}
"""Families that llama.cpp's converter takes for another one."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What an export is asked for: one of `kinds`, a GGUF file or a folder, for an engine or for all."""

    kinds: Sequence[str] = field(default_factory=lambda: tuple(families))
    engine: Engine | None = None
    gguf: bool = False

    @classmethod
    def of(cls, kind: str = "auto", engine: Engine | None = None) -> "Asked":
        """Return what --format and --for mean."""
        if kind == "gguf":
            return cls(kinds=tuple(architectures), engine="llama.cpp", gguf=True)
        return cls(engine=engine) if kind == "auto" else cls(kinds=(kind,), engine=engine)


ALL = Asked(engine="transformers")
"""Any class of transformers."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The class that holds a model: as it is, or once its attention has become the MLA of DeepSeek, exactly."""

    family: Family
    converted: bool


def fit(config: ModelConfig, asked: Asked) -> Fit:
    """Return the first class asked for that can hold a model. Raises ConfigError with the reason, without a way out.

    Of several classes the reason is that of DeepSeek's, to which others convert.
    """
    converted = False
    try:
        family = stock.fitting(config, asked.kinds)
    except ConfigError as error:
        if DEEPSEEK not in asked.kinds or not isinstance(config, GPTConfig):
            raise
        try:
            deepseek_layers(config, asked.engine)
        except ConfigError as other:
            raise ConfigError(str(other) if len(asked.kinds) == 1 else f"{error} {other}") from error
        family, converted = families[DEEPSEEK], True
    assert isinstance(config, GPTConfig)
    first = config.attention[0]
    if not converted and asked.engine is not None and isinstance(first, LatentConfig):
        require_served(first, family.architecture, asked.engine)
    if asked.engine is not None:
        require_computed(config, family, asked.engine)
    served = asked.engine == "llama.cpp" and not isinstance(first, LatentConfig)
    if (asked.gguf or served) and not converted and (name := architecture_of(family)) is not None:
        architectures[name].keys(config)
    return Fit(family=family, converted=converted)


def architecture_of(family: Family) -> str | None:
    """Return the name of llama.cpp's architecture for a class whose computation there is known; else None."""
    name = families.name_of(family)
    name = AS_GGUF.get(name, name)
    return name if name in architectures else None


def require_fit(config: ModelConfig, asked: Asked) -> Fit:
    """Return the class of `fit`. Raises ConfigError with the reason and the ways out that work for this model."""
    try:
        return fit(config, asked)
    except ConfigError as error:
        reason, text = str(error), KEPT
        if isinstance(config, GPTConfig):
            text = ", or ".join(_ways_out(config, asked)).replace(", or use ", ", or ")
            reason = reason if text else _last_reason(config, asked) or reason
            text = text or KEPT + (
                ", or train one like it with model.shape=llama" * bool(_fits(_like_llama(config), ALL))
            )
        raise ConfigError(f"{reason} {text[0].upper()}{text[1:]}.") from error


def lacks_class(config: ModelConfig, asked: Asked = ALL) -> str:
    """Return why no stock class of transformers can hold a model, or none that an engine takes; empty if one can."""
    try:
        fit(config, asked)
    except ConfigError as error:
        return str(error).removeprefix(f"{stock.NONE} ")
    return ""


def _last_reason(config: GPTConfig, asked: Asked) -> str:
    """Return why the class asked for cannot hold a model whatever the engine."""
    try:
        fit(config, replace(asked, engine="transformers"))
    except ConfigError as error:
        return str(error)
    return ""


def _fits(config: GPTConfig, asked: Asked) -> Family | None:
    try:
        return fit(config, asked).family
    except ConfigError:
        return None


def _ways_out(config: GPTConfig, asked: Asked) -> Iterator[str]:
    """Yield what leads to an export: another engine, another format, a conversion, or another training."""
    every = Asked(engine=None if asked.gguf else asked.engine)
    found = False
    if not asked.gguf and _fits(config, replace(asked, engine="transformers")):
        found = True
        yield f"use {ANY}"
    if other := _fits(config, every):
        found = True
        yield f"use --format {families.name_of(other)}{', which writes a folder' if asked.gguf else ''}"
    elif not found and (other := _fits(config, replace(every, engine="transformers"))):
        found = True
        yield f"use --format {families.name_of(other)} {ANY}"
    if converted := next(_converted(config, asked), ""):
        yield converted
    elif not found:
        yield from islice(chain(_converted(config, every), _converted(config, ALL, f" {ANY}")), 1)
    if asked.engine in SERVERS and (made := _canonical(config)) and _fits(made, asked):
        yield "convert its source with --to mla --target canonical"
    if not found:
        yield from _last_ways(config, asked)


def _last_ways(config: GPTConfig, asked: Asked) -> Iterator[str]:
    """Yield what the source of this model can become instead."""
    kinds: tuple[Kind, ...] = ("uneven", "canonical")
    made = {kind: one for kind in kinds if (one := _decoupled(config, kind))}
    ways = {
        kind: f"convert its source with --to mla --target {kind}, which rebuilds no keys" for kind in made
    }
    if fitting := next((kind for kind in made if _fits(made[kind], asked)), None):
        yield ways[fitting]
    elif fitting := next((kind for kind in made if _fits(made[kind], ALL)), None):
        yield f"{ways[fitting]}, and use --format {DEEPSEEK} {ANY}"


def _decoupled(config: GPTConfig, kind: Kind) -> GPTConfig | None:
    """Return what a target with a rotary part makes of the heads that a latent with rebuilt keys was made from."""
    layers = []
    for layer in config.attention:
        if not isinstance(layer, LatentConfig) or not layer.rebuilds_keys:
            return None
        heads = GroupedConfig(**common(layer), n_kv_head=layer.n_kv_head, head_dim=layer.qk_nope_head_dim)
        try:
            layers.append(Target(to="mla", target=kind).attention(heads, config.n_embd))
        except ConfigError:
            return None
    return replace(config, attention=tuple(layers))


def _canonical(config: GPTConfig) -> GPTConfig | None:
    """Return what `--target canonical` makes of the heads that an uneven MLA was made from; None if it takes none."""
    heads = [_rotary_heads(layer) for layer in config.attention]
    try:
        target = Target(to="mla", target="canonical")
        layers = tuple(target.attention(one, config.n_embd) for one in heads if one is not None)
    except ConfigError:
        return None
    return replace(config, attention=layers) if len(layers) == config.n_layer else None


def _rotary_heads(layer: AttentionConfig) -> GroupedConfig | None:
    """Return heads that an MLA with a rotary part of chosen frequencies may have been made from."""
    if not isinstance(layer, LatentConfig) or layer.latent_norm or layer.rebuilds_keys:
        return None
    if layer.rope is None or layer.rope.magnitude != 1:  # yarn or longrope, which canonical does not take
        return None
    plain = common(layer) | {"rope": RopeConfig(layout=layer.rope.layout)}
    return GroupedConfig(**plain, n_kv_head=layer.n_kv_head, head_dim=layer.v_head_dim)


def _like_llama(config: GPTConfig) -> GPTConfig:
    """Return a model of Llama's shape with as many heads."""
    plain: Any = {"rope": RopeConfig(), "qkv_bias": False, "o_bias": False, "tie_kv": False}
    layers = tuple(
        replace(layer, **plain) if isinstance(layer, GroupedConfig) else layer for layer in config.attention
    )
    return replace(config, attention=layers, mlp_bias=False, **LLAMA)


def _converted(config: GPTConfig, asked: Asked, engine: str = "") -> Iterator[str]:
    """Yield conversions after which a model is as asked, the exact ones first; `engine` names another one for it."""
    lossy = []
    targets = {f"--to {to}": Target(to=to) for to in ("gqa", "mha", "mqa")}
    heads = [layer for layer in config.attention if isinstance(layer, GroupedConfig)]
    if any(layer.head_map != "contiguous" for layer in heads):
        targets = {"--head-map contiguous": Target(head_map="contiguous")} | targets
    if asked.engine in SERVERS or list(asked.kinds) == [DEEPSEEK]:
        targets = {"--to mla --target canonical": Target(to="mla", target="canonical")} | targets
    for to, target in targets.items():
        try:
            layers = [target.attention(layer, config.n_embd) for layer in config.attention]
            pairs = dict.fromkeys(zip(config.attention, layers, strict=True))
            steps = [step for old, new in pairs for step in path(old, new, config.n_embd)]
        except ConfigError:
            continue
        family = _fits(replace(config, attention=tuple(layers)), asked)
        if family is None or not steps:
            continue
        form = f" for --format {families.name_of(family)}" if len(asked.kinds) > 1 and not asked.gguf else ""
        if all(step.promise.exact for step in steps):
            yield f"convert it with {to}{form}{engine}"
        else:
            lossy.append(f"convert it with {to}{form}{engine}, which is not exact, and heal it")
    yield from lossy
