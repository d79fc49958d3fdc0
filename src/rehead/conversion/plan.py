"""What each variant would cost, and whether the model can be converted to it, from the config alone."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rehead.attention import GroupedConfig, LatentConfig
from rehead.config import ExpertsConfig, GPTConfig, ModelConfig, RNNConfig
from rehead.config.model import LARGEST
from rehead.conversion.base import summary
from rehead.conversion.export.fit import Asked, lacks_class
from rehead.conversion.rotary import require_one_rotation
from rehead.conversion.target import Target
from rehead.conversion.variants import Variant, Verdict, others, share
from rehead.errors import ConfigError
from rehead.measure import cache_bytes, kv_bytes_per_token, parameters
from rehead.measure.kv_dtype import KVDtype, kv_dtypes
from rehead.measure.parts import Parts, parts
from rehead.measure.size import active_parameters, decode_bytes, decode_flops

MOST_SEQUENCES = 1 << 20
"""Sequences decoded at once in a plan, at most; more is a typing error."""
MOST_GPUS = 4096
"""GPUs that share the heads of a layer in a plan, at most."""
REBUILDING = (
    "Rebuilt keys save memory, not time: every step reads R numbers per past token and layer and multiplies "
    "them into all keys and values."
)
DECOUPLED = {
    "uneven": (
        "some directions of the keys keep their rotation, the others lose it, so that nothing is rebuilt: far "
        "fewer FLOPs than rebuilt keys, and a larger loss.",
        "transformers has a class for it.",
    ),
    "canonical": (
        "as uneven, with the sizes and angles of DeepSeek's own class.",
        "vLLM and SGLang serve it with their MLA kernels.",
    ),
}
"""Targets with a rotary part: what they are, and who serves them."""
CLASSLESS = "No stock class can hold the result, so `export` refuses it:"
TIED = (
    "tied: keys and values are the same numbers, cached once, as in the reduced form of MLA (--to reduced)."
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One variant. Bytes are those of the planned dtype; FLOPs and read bytes of one decode step, on all GPUs together.

    `gpu_kv_bytes_per_token` and `gpu_cache_bytes` are the part that the fullest GPU holds.

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
    gpu_kv_bytes_per_token: int
    gpu_cache_bytes: int
    decode_flops: int
    decode_bytes: int
    layer: Parts | None
    verdict: Verdict
    why: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All variants, the present one first, which of them to choose, and what is to be known about them.

    `tp` is the number of GPUs that share the heads of every layer; `kv_dtype` is the format of the cache.
    """

    context: int
    batch_size: int
    tp: int
    dtype: str
    kv_dtype: str
    rows: list[Row]
    advice: str
    notes: list[str]


def plan(
    config: ModelConfig,
    context: int,
    batch_size: int = 1,
    dtype: torch.dtype = torch.float32,
    tp: int = 1,
    kv_dtype: str | None = None,
) -> Plan:
    """Return every variant of `config` at a context length, on `tp` GPUs under tensor parallelism.

    The cache has the `dtype` of the weights, or a `kv_dtype`, a name of `rehead.measure.kv_dtype.kv_dtypes`.

    A model without heads, or with an attention that no conversion takes, gets one row, and the reason as advice.
    """
    for name, size, largest in (
        ("context", context, LARGEST["block_size"]),
        ("batch", batch_size, MOST_SEQUENCES),
        ("tp", tp, MOST_GPUS),
    ):
        if not 1 <= size <= largest:
            raise ConfigError(f"{name}={size}. Use 1 to {largest:,}.")

    variants = [Variant(command="", config=config, verdict="present", why="")]
    refused = ""
    kind = None if kv_dtype is None else kv_dtypes[kv_dtype]()
    if kind is not None:
        kind.require(config)
    try:
        variants += others(config, kind or dtype)
    except ConfigError as error:
        refused = str(error)
    left_out: list[str] = []
    if kind is not None:
        fit = [variant for variant in variants if not kind.fault(variant.config)]
        if len(fit) < len(variants):
            left_out = [f"Variants left out, as {kind.name} cannot hold them: {len(variants) - len(fit)}."]
        variants = fit
    rows = [_row(variant, context, batch_size, dtype, kind, tp) for variant in variants]
    return Plan(
        context=context,
        batch_size=batch_size,
        tp=tp,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=kv_dtype or str(dtype).removeprefix("torch."),
        rows=rows,
        advice=refused or _advice(rows, variants, is_coarse=kind is not None and kind.is_coarse),
        notes=[*_notes(variants, context), *left_out, *_of_gpus(rows, variants, tp)],
    )


def _row(
    variant: Variant, context: int, batch_size: int, dtype: torch.dtype, kind: KVDtype | None, tp: int
) -> Row:
    config, layer, kept = variant.config, variant.attention, kind or dtype
    return Row(
        variant=_name(config, variant.command),
        command=variant.command,
        parameters=parameters(config),
        active_parameters=active_parameters(config),
        kv_bytes_per_token=kv_bytes_per_token(config, kept),
        cache_bytes=cache_bytes(config, context, batch_size, kept),
        gpu_kv_bytes_per_token=kv_bytes_per_token(config, kept, tp),
        gpu_cache_bytes=cache_bytes(config, context, batch_size, kept, tp),
        decode_flops=decode_flops(config, context) * batch_size,
        decode_bytes=decode_bytes(config, context, batch_size, dtype, kind, tp),
        layer=None if layer is None else parts(layer, config.n_embd, context),
        verdict=variant.verdict,
        why=variant.why,
    )


def _name(config: ModelConfig, command: str) -> str:
    if isinstance(config, GPTConfig):
        name = config.attention[0].describe()
        made = next((target for target in DECOUPLED if f"--target {target}" in command), "")
        return f"{name.removesuffix(', rope').replace('rank ', '')}, {made}" if made else name
    assert isinstance(config, RNNConfig)
    return f"rnn, a state of {config.n_layer} x {config.n_hidden}"


def _advice(rows: list[Row], variants: list[Variant], *, is_coarse: bool) -> str:
    """Recommend the smallest exact cache or, without one, the largest approximate latent."""
    full = rows[0].gpu_kv_bytes_per_token
    exact = [row for row in rows if row.verdict == "exact" and row.gpu_kv_bytes_per_token < full]
    lossy = [
        (row, isinstance(variant.attention, LatentConfig))
        for row, variant in zip(rows, variants, strict=True)
        if row.verdict == "approximate" and row.gpu_kv_bytes_per_token < full
    ]
    if exact:
        best = min(exact, key=lambda row: (row.gpu_cache_bytes, row.parameters))
        part = share(best.gpu_kv_bytes_per_token, full)
        kept = (
            "is the same function before the cache is rounded, with" if is_coarse else "keeps every logit and"
        )
        return f"{best.command} {kept} {part} of the cache."
    if lossy:
        latents = (row for row, latent in lossy if latent and "--target" not in row.command)
        best = max(latents, key=lambda row: row.gpu_cache_bytes, default=lossy[0][0])
        return f"Nothing smaller is exact. {best.command} usually loses least; measure it with --calibration TEXT."
    narrowed = (
        isinstance(variant.attention, LatentConfig) and variant.verdict == "approximate"
        for variant in variants
    )
    if full < rows[0].kv_bytes_per_token and any(narrowed):
        least = full / rows[0].kv_bytes_per_token
        return (
            f"None of these is smaller on each GPU. A latent is whole on each: only --to mla with --kv-fraction below "
            f"{least:.3g} would be."
        )
    return "Nothing smaller can be made of this model: keep it as it is."


def _notes(variants: list[Variant], context: int) -> Iterator[str]:
    """Yield what a reader of the rows needs: the meaning of their words, and the context the model was made for."""
    possible = [variant for variant in variants if variant.verdict != "impossible"]
    layers = [variant.attention for variant in possible]
    yield from _of_layers(variants[0].config)
    if any(isinstance(layer, LatentConfig) and layer.rebuilds_keys for layer in layers):
        yield REBUILDING
    for target, (words, served) in DECOUPLED.items():
        if made := [variant.config for variant in possible if f"--target {target}" in variant.command]:
            lacking = [lacks_class(config) for config in made]
            if target == "canonical" and all(
                unserved := [lacks_class(config, Asked.of("auto", "vllm")) for config in made]
            ):
                served = f"vLLM and SGLang cannot serve it: {unserved[0]}"
            yield f"{target}: {words} {f'{CLASSLESS} {lacking[0]}' if all(lacking) else served}"
    yield from _without_rotary_part(variants[0].config)
    if any(isinstance(one.attention, GroupedConfig) and one.attention.tie_kv for one in variants):
        yield TIED
    told = (variant.step for variant in variants if variant.why.startswith(f"{variant.step}: "))
    for step in dict.fromkeys(filter(None, told)):
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


def _without_rotary_part(config: ModelConfig) -> Iterator[str]:
    """Yield why no row has a rotary part of the frequencies that matter, of a model whose heads rotate."""
    asked = Target(to="mla", target="uneven", kv_fraction=0.5)
    layers = dict.fromkeys(config.attention if isinstance(config, GPTConfig) else ())
    try:
        for layer in layers:
            asked.attention(layer, config.n_embd)
        require_one_rotation(layers)
    except ConfigError as error:
        yield f"--target uneven is left out: {error}"


def _of_layers(config: ModelConfig) -> Iterator[str]:
    """Yield the kinds of attention of a model whose layers differ, where a row is named by the first layer."""
    kinds = Counter(layer.describe() for layer in config.attention) if isinstance(config, GPTConfig) else {}
    if len(kinds) > 1:
        named = "; ".join(f"{count} of {kind}" for kind, count in kinds.items())
        yield f"Layers differ: {named}. Rows are named after the first layer; their figures cover all layers."


def _of_gpus(rows: list[Row], variants: list[Variant], tp: int) -> Iterator[str]:
    """Yield what tensor parallelism makes of the rows: latents are on every GPU, and heads must divide."""
    if tp == 1:
        return
    present, *others = rows
    why = {
        True: f"On {tp} GPUs the KV heads are split, but each GPU holds the whole latent.",
        False: f"KV heads that are fewer than {tp} GPUs, or do not divide among them, are held several times.",
    }
    for is_latent, words in why.items():
        larger = [
            row.variant
            for row, variant in zip(others, variants[1:], strict=True)
            if row.kv_bytes_per_token < present.kv_bytes_per_token
            and row.gpu_kv_bytes_per_token >= present.gpu_kv_bytes_per_token
            and isinstance(variant.attention, LatentConfig) is is_latent
        ]
        if larger:
            yield f"{words} These variants are no smaller per GPU than the present cache: {'; '.join(larger)}."
    config = variants[0].config
    layers = config.attention if isinstance(config, GPTConfig) else ()
    heads = {shape[0] for layer in layers for shape in layer.cache_rows().values() if len(shape) == 2}
    uneven = sorted(n_head for n_head in heads if n_head % tp and tp % n_head)
    if uneven:
        yield (
            f"{' and '.join(map(str, uneven))} KV heads do not divide among {tp} GPUs, which engines refuse. The "
            "figures are those of the fullest GPU."
        )
    counts = {getattr(layer.equivalent(), "n_query_head", 0) for layer in layers}
    if queries := sorted(count for count in counts if count % tp):
        yield (
            f"{' and '.join(map(str, queries))} query heads do not divide among {tp} GPUs, which engines refuse, for "
            "every variant."
        )


def _of_experts(config: GPTConfig, experts: ExpertsConfig) -> str:
    return (
        f"{len(experts.layers)} of {config.n_layer} layers have {experts.n_routed_experts} experts; a token uses "
        f"{experts.num_experts_per_tok}: {active_parameters(config):,} of {parameters(config):,} parameters. FLOPs "
        "and bytes read are of these; a larger batch reads more experts. Conversions copy them as they are."
    )
