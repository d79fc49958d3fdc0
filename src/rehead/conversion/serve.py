"""A model as one that stock engines serve: attention in DeepSeek's shape, norms with DeepSeek's eps."""

import math
from dataclasses import asdict, replace

import torch

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.latent import NORM_EPS
from rehead.config import GPTConfig, encode
from rehead.conversion.certificate import Certificate, describe
from rehead.conversion.convert import convert, random_blocks, require_heads
from rehead.conversion.latent import full_rank
from rehead.conversion.path import path
from rehead.errors import ConfigError
from rehead.measure import parameters
from rehead.measure.fidelity import compare
from rehead.model import LanguageModel, build

RANK, HEAD, ROPE = 512, 128, 64
"""DeepSeek's own sizes, the ones every engine's MLA kernels know: vLLM's on a CPU know no others."""


def to_deepseek(model: LanguageModel) -> tuple[LanguageModel, Certificate]:
    """`model` for plain `DeepseekV3ForCausalLM`, exactly, and its certificate, measured on random tokens.

    MQA with rope (heads of 64, 32 or 16), and every model without rope. Raises ConfigError for the rest:
    KV heads that each rotate their own way do not fit into one shared rotary part.
    """
    config = require_heads(model)
    require_sayable(config)
    if model.head.weight.dtype == torch.float16:
        raise ConfigError("float16 cannot hold the identity norm's small numbers: use bfloat16 or float32.")
    wide = [stock_target(layer, config.n_embd) for layer in config.attention]
    for layer, target in zip(config.attention, wide, strict=True):
        lossy = [step.promise.why for step in path(layer, target, config.n_embd) if not step.promise.exact]
        if lossy:
            raise ConfigError(
                f"{describe(layer)} is no exact DeepseekV3ForCausalLM ({'; '.join(lossy)}): every KV head rotates in "
                "its own way, and that class has one rotary part for all. Convert it to mqa and heal it first."
            )
    converted, certificate = convert(model, wide)
    found = with_eps(converted, NORM_EPS)
    logits = asdict(compare(model, found, random_blocks(config, certificate.seed)))
    del logits["losses"]
    sizes = [certificate.parameters[0], parameters(found.config)]
    return found, replace(certificate, logits=logits, result=encode(found.config), parameters=sizes)


def require_sayable(config: GPTConfig) -> None:
    """Refuse what DeepSeek's class has no place for, beside the attention."""
    if config.norm != "rmsnorm" or config.mlp != "swiglu" or config.mlp_bias or config.learned_positions:
        raise ConfigError(
            "DeepseekV3ForCausalLM has RMSNorm, SwiGLU without biases and no learned positions; this model has "
            f"norm={config.norm}, mlp={config.mlp}, mlp_bias={config.mlp_bias}, "
            f"learned_positions={config.learned_positions}. Train one of Llama's shape."
        )


def stock_target(layer: AttentionConfig, d_model: int) -> LatentConfig:
    """The attention of DeepSeek's class that has room for `layer`."""
    assert isinstance(layer, GroupedConfig | LatentConfig)
    needed = layer.kv_lora_rank if isinstance(layer, LatentConfig) else full_rank(layer, d_model)
    if isinstance(layer, GroupedConfig) and layer.rope is not None:
        needed = layer.v_head_dim if layer.n_kv_head == 1 else RANK  # of more heads nothing is exact
        if layer.n_kv_head == 1 and ROPE % layer.head_dim:
            raise ConfigError(
                f"head_dim={layer.head_dim} with rope: the rotary part that engines know is {ROPE} wide. Use heads of "
                "64, 32 or 16, or --format llama."
            )
    if layer.window is not None:
        raise ConfigError(
            f"window={layer.window}: DeepseekV3ForCausalLM has no window. Use --format mistral."
        )
    if needed > RANK:
        raise ConfigError(
            f"its keys and values need {needed} numbers a token, engines take {RANK}: convert it first."
        )
    return LatentConfig(
        n_query_head=layer.n_query_head,
        kv_lora_rank=RANK,
        qk_nope_head_dim=HEAD,
        qk_rope_head_dim=ROPE,
        v_head_dim=HEAD,
        rope=replace(layer.rope or RopeConfig(), layout="interleaved"),
        qkv_bias=layer.qkv_bias,
        o_bias=layer.o_bias,
        attn_pdrop=layer.attn_pdrop,
    )


def with_eps(model: LanguageModel, eps: float) -> LanguageModel:
    """The same function with another eps in the norms of the residual stream.

    RMSNorm(a h; a^2 eps) is RMSNorm(h; eps): all that is written to the stream is multiplied by a.
    """
    config = model.config
    assert isinstance(config, GPTConfig)
    if config.norm_eps == eps and not config.tie_embeddings:
        return model
    factor = math.sqrt(eps / config.norm_eps)
    state = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    state["head.weight"] = model.head.weight.detach().clone()
    for name in state:
        if name == "embed_tokens.weight" or ".o_proj." in name or ".down_proj." in name:
            state[name] = (state[name].double() * factor).to(state[name].dtype)
    with torch.device("meta"):
        made = build(replace(config, norm_eps=eps, tie_embeddings=False))
    made.load_state_dict(state, assign=True)
    return made.eval()
