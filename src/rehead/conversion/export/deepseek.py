"""A model as one that stock engines serve: attention in DeepSeek's shape, norms with DeepSeek's eps."""

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.latent import NORM_EPS
from rehead.checkpoint.files.deferred import map_deferred
from rehead.checkpoint.huggingface.base import different, unusual
from rehead.config import GPTConfig, encode
from rehead.config.model import SCALES
from rehead.conversion.arguments import require_heads
from rehead.conversion.base import CannotConvert, heads_of
from rehead.conversion.blocks import random_blocks
from rehead.conversion.certificate import Certificate
from rehead.conversion.converter import convert
from rehead.conversion.export.engines import ENGINES, V3, Engine, kind, require_served
from rehead.conversion.export.storable import require_wide, storable
from rehead.conversion.search import path
from rehead.conversion.steps.deepseek import IdentityNorm, side_by_side, unrotated
from rehead.conversion.steps.latent import full_rank
from rehead.conversion.yarn import reaching
from rehead.errors import ConfigError
from rehead.measure import parameters
from rehead.measure.fidelity import compare
from rehead.model import LanguageModel, assembled
from rehead.nn.rows import by_rows

RANK, HEAD, ROPE = 512, 128, 64
"""DeepSeek's own sizes, the ones every engine's MLA kernels know: vLLM's on a CPU know no others."""
SMALL_RANK = 256
"""A smaller latent, which kernels on GPUs know as well."""


def to_deepseek(
    model: LanguageModel, engine: Engine | None = None, scratch: Path | None = None
) -> tuple[LanguageModel, Certificate]:
    """Return `model` as an exact, plain `DeepseekV3ForCausalLM`, and its certificate, measured on random tokens.

    Without an engine, for vLLM and SGLang: MQA with rope (heads of 64, 32 or 16), and models without rope whose keys
    and values need at most 512 numbers. For transformers: any number of KV heads of any width, with any rope; for mlx
    and llama.cpp the same with the angles they compute (`engines.ENGINES`). Raises ConfigError for the rest.
    """
    config = require_heads(model)
    require_wide(model.head.weight.dtype)
    wide = deepseek_layers(config, engine)
    normed, folded = [], []
    for index, (layer, target) in enumerate(zip(config.attention, wide, strict=True)):
        steps = path(layer, target, config.n_embd)
        normed += [index] * any(isinstance(step.conversion, IdentityNorm) for step in steps)
        folded += [index] * heads_of(layer).qkv_bias
    converted, certificate = convert(model, wide, scratch=scratch)
    found = (
        with_eps(converted, config.norm_eps, tied=config.tie_embeddings)
        if engine == "transformers"
        else for_every_engine(converted)
    )
    found = storable(found, normed, folded) if normed else found
    if found is not converted:
        logits = asdict(compare(model, found, random_blocks(config, certificate.seed)))
        del logits["losses"]
        certificate = replace(certificate, logits=logits)
    sizes = [certificate.parameters[0], parameters(found.config)]
    return found, replace(certificate, result=encode(found.config), parameters=sizes)


def deepseek_layers(config: GPTConfig, engine: Engine | None) -> list[LatentConfig]:
    """Return the attention of each layer in DeepSeek's class; ConfigError with the reason if it cannot be exact."""
    require_sayable(config)
    if engine is None or ENGINES[engine].padded:
        wide = {layer: stock_target(layer, config.n_embd) for layer in config.attention}
    else:
        wide = {layer: _own(layer, config.n_embd, engine) for layer in config.attention}
    for layer, target in wide.items():
        lossy = [step.promise.why for step in path(layer, target, config.n_embd) if not step.promise.exact]
        if lossy:
            raise ConfigError(
                f"{layer.describe()} cannot become an exact DeepseekV3ForCausalLM ({'; '.join(lossy)}): every KV head "
                "rotates in its own way, and vLLM and SGLang have one rotary part of 64."
            )
    layers = [wide[layer] for layer in config.attention]
    require_alike(layers)
    return layers


def _own(layer: AttentionConfig, d_model: int, engine: Engine) -> LatentConfig:
    """Return the attention of DeepSeek's class for an engine that takes any sizes."""
    target = own_target(layer, d_model)
    try:
        return read_by(engine, target)
    except ConfigError as error:
        heads = heads_of(layer)
        if isinstance(heads, GroupedConfig) and heads.rope is not None and heads.n_kv_head > 1:
            raise ConfigError(
                f"As DeepSeek's MLA, its {heads.n_kv_head} KV heads would rotate side by side, as a longrope: {error}"
            ) from error
        raise


def require_alike(layers: Sequence[AttentionConfig]) -> None:
    """Refuse layers that differ, for which DeepSeek's config.json has no keys."""
    if len(set(layers)) > 1:
        raise CannotConvert(
            f"DeepseekV3ForCausalLM has layers that are all alike, and this model has {different(layers)}.",
            different(layers),
        )


def require_sayable(config: GPTConfig) -> None:
    """Refuse what DeepSeek's class cannot represent, apart from the attention."""
    if config.experts is not None:
        raise CannotConvert(
            "Experts can only be exported in the class of their own family, with an attention that it has: no "
            "conversion turns them into DeepseekV3ForCausalLM's.",
            "its experts, which no conversion changes",
        )
    plain = config.norm == "rmsnorm" and config.mlp == "swiglu" and not config.mlp_bias
    odd = [name for name, is_odd in unusual(config).items() if is_odd]
    if not plain or config.learned_positions or odd:
        has = ", ".join(
            f"{name}={getattr(config, name)}"
            for name in ("norm", "mlp", "mlp_bias", "learned_positions", *odd)
            if name in odd or getattr(config, name) not in ("rmsnorm", "swiglu", False)
        )
        raise CannotConvert(
            f"DeepseekV3ForCausalLM cannot represent {has}, which no conversion changes.",
            f"{has}, which no conversion changes",
        )


def stock_target(layer: AttentionConfig, d_model: int) -> LatentConfig:
    """Return the attention of DeepSeek's class that can hold `layer`, with the sizes of vLLM's kernels."""
    _require_representable(layer)
    layer = heads_of(layer)
    if layer.qkv_bias or layer.o_bias or (isinstance(layer, LatentConfig) and layer.down_bias):
        raise ConfigError(
            "its attention has biases, and DeepseekV3ForCausalLM of vLLM and SGLang leaves them out."
        )
    rank = RANK
    if isinstance(layer, LatentConfig) and layer.qk_rope_head_dim:
        rank = _require_canonical(layer)
    if isinstance(layer, LatentConfig) and max(layer.qk_nope_head_dim, layer.v_head_dim) > HEAD:
        raise ConfigError(
            f"heads of {max(layer.qk_nope_head_dim, layer.v_head_dim)} numbers that do not rotate: vLLM's heads hold "
            f"{HEAD}."
        )
    needed = layer.kv_lora_rank if isinstance(layer, LatentConfig) else full_rank(layer, d_model)
    if isinstance(layer, GroupedConfig) and layer.rope is not None:
        rotated, still = layer.rope.rotated(layer.head_dim), unrotated(layer)
        needed = still + layer.v_head_dim if layer.n_kv_head == 1 else RANK  # of more heads nothing is exact
        if layer.n_kv_head == 1 and ROPE % rotated:
            raise ConfigError(
                f"head_dim={layer.head_dim} with rope: the rotary part that vLLM knows is {ROPE} wide, for heads "
                "of 64, 32 or 16."
            )
        if still > HEAD:
            raise ConfigError(
                f"head_dim={layer.head_dim}, of which {still} do not rotate: vLLM's heads hold {HEAD} such numbers."
            )
        if layer.rope.scaling is not None:
            raise ConfigError("scaled rope: DeepseekV3ForCausalLM of vLLM and SGLang computes other angles.")
    if needed > RANK:
        raise ConfigError(
            f"its keys and values need {needed} numbers a token, and the kernels of engines take {RANK}."
        )
    return LatentConfig(
        n_query_head=layer.n_query_head,
        kv_lora_rank=rank,
        qk_nope_head_dim=HEAD,
        qk_rope_head_dim=ROPE,
        v_head_dim=HEAD,
        rope=replace(layer.rope or RopeConfig(), layout="interleaved", partial_rotary_factor=1.0),
        attn_pdrop=layer.attn_pdrop,
    )


def _require_canonical(layer: LatentConfig) -> int:
    """Return the rank that kernels know for a latent beside a rotary part; refuse angles they do not compute."""
    assert layer.rope is not None
    if kind(layer.rope) not in ENGINES["vllm"].angles or ROPE % layer.qk_rope_head_dim:
        raise ConfigError(
            f"{layer.describe()}: vLLM's DeepseekV3ForCausalLM has {ROPE} rotated numbers of frequencies of its own."
        )
    return SMALL_RANK if layer.kv_lora_rank <= SMALL_RANK else RANK


def own_target(layer: AttentionConfig, d_model: int) -> LatentConfig:
    """Return the smallest attention of DeepSeek's class for `layer`, for an engine that takes any sizes and angles.

    Its heads are 4, 16, ... times as wide as the layer's, so that the queries are multiplied by a power of
    two, which rounds nothing.
    """
    _require_representable(layer)
    layer = heads_of(layer)
    biased = layer.qkv_bias or layer.o_bias or (isinstance(layer, LatentConfig) and layer.down_bias)
    biases: Any = {"down_bias": biased, "o_bias": biased}
    if layer.qkv_bias:
        biases["q_lora_rank"] = d_model + 1
    if isinstance(layer, LatentConfig) and layer.qk_rope_head_dim:
        return replace(layer, n_kv_head=layer.n_query_head, latent_norm=True, qkv_bias=False, **biases)
    width = layer.head_dim if isinstance(layer, GroupedConfig) else layer.qk_nope_head_dim
    least, rope, rotated = width, RopeConfig(), 2  # the class always has a rotary part: zeros here
    rank = layer.kv_lora_rank if isinstance(layer, LatentConfig) else full_rank(layer, d_model)
    if isinstance(layer, GroupedConfig) and layer.rope is not None:
        still, rotated = unrotated(layer), layer.n_kv_head * layer.rope.rotated(layer.head_dim)
        least, rank = max(1, still), layer.n_kv_head * (still + layer.v_head_dim)
        rope = side_by_side(layer.rope, layer.n_kv_head, layer.head_dim)
    both = 4 * width
    while both < rotated + least:
        both *= 4
    return LatentConfig(
        n_query_head=layer.n_query_head,
        kv_lora_rank=rank,
        qk_nope_head_dim=both - rotated,
        qk_rope_head_dim=rotated,
        v_head_dim=layer.v_head_dim,
        rope=rope,
        attn_pdrop=layer.attn_pdrop,
        **biases,
    )


def read_by(engine: Engine, layer: LatentConfig) -> LatentConfig:
    """Return the attention in a layout that an engine reads; raises ConfigError where it computes other angles."""
    assert layer.rope is not None
    layouts = ENGINES[engine].angles.get(kind(layer.rope), ())
    if layouts and layer.rope.layout not in layouts:
        layer = replace(layer, rope=replace(layer.rope, layout=layouts[0]))
    require_served(layer, V3, engine)
    return layer


def _require_representable(layer: AttentionConfig) -> None:
    if layer.window is not None:
        raise CannotConvert(
            f"window={layer.window}: DeepseekV3ForCausalLM has no window.", f"window={layer.window}"
        )
    if isinstance(layer, LatentConfig) and layer.qk_norm_eps is not None:
        raise ConfigError(
            f"{layer.describe()} with norms on queries and keys: no engine has a class that norms keys from a latent."
        )
    if isinstance(layer, GroupedConfig) and layer.qk_norm_eps is not None:
        raise ConfigError("DeepseekV3ForCausalLM has no norms on queries and keys, and this model has.")
    if isinstance(layer, LatentConfig) and layer.rebuilds_keys:
        raise ConfigError(
            f"{layer.describe()}: no engine has a class whose keys are rebuilt from a latent and then rotated."
        )


def for_every_engine(model: LanguageModel) -> LanguageModel:
    """Return the same function as every engine reads it: eps 1e-6 in norms, a head of its own, a long enough yarn."""
    found = with_eps(model, NORM_EPS, tied=False)
    config = found.config
    assert isinstance(config, GPTConfig)
    layers = tuple(
        replace(layer, rope=reaching(layer.rope, config.block_size))
        if isinstance(layer, LatentConfig) and layer.rope is not None
        else layer
        for layer in config.attention
    )
    if layers == config.attention:
        return found
    state = {name: weight.detach() for name, weight in found.state_dict().items()}
    return assembled(replace(config, attention=layers), state)


def with_eps(model: LanguageModel, eps: float, *, tied: bool) -> LanguageModel:
    """Return the same function with another eps in the norms of the residual stream, and no scales in it.

    RMSNorm(a h; a^2 eps) is RMSNorm(h; eps): all that is written to the stream is multiplied by a. MiniCPM's
    scales go into the same weights; embeddings stay tied if `tied` and no weight has to change.
    """
    config = model.config
    assert isinstance(config, GPTConfig)
    factor = math.sqrt(eps / config.norm_eps)
    if factor == 1 and not config.scaled and config.tie_embeddings <= tied:
        return model
    state = {name: weight.detach() for name, weight in model.state_dict().items()}
    state["head.weight"] = model.head.weight.detach()
    times = {"embed_tokens.weight": factor * config.embed_scale, "head.weight": config.logit_scale}
    for name, weight in state.items():
        writes = ".o_proj." in name or ".down_proj." in name
        scale = factor * config.residual_scale if writes else times.get(name, 1.0)
        state[name] = map_deferred(partial(_times, scale=scale), weight)
    plain: Any = dict.fromkeys(SCALES, 1.0)
    return copy.deepcopy(assembled(replace(config, norm_eps=eps, tie_embeddings=False, **plain), state))


def _times(weight: Tensor, scale: float) -> Tensor:
    return weight if scale == 1 else by_rows(lambda rows: rows.double() * scale, weight)
