"""The attention of a layer from the flags of a model: which flag belongs to which attention, and the defaults."""

from dataclasses import MISSING, fields, replace
from typing import TYPE_CHECKING, Any

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig, scores, variants
from rehead.attention.grouped_config import divisors
from rehead.attention.rope_scaling import RopeScaling
from rehead.config.codec import decode, encode
from rehead.errors import ConfigError, InvalidInput
from rehead.registry import nearest

if TYPE_CHECKING:
    from rehead.config.model_options import ModelOptions

Variant = type[AttentionConfig]
LATENT_ONLY = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "latent_norm")
GROUPED_ONLY = ("head_map", "score", "score_width", "tie_kv")
ROPE_ONLY = ("rope_theta", "rope_layout", "rope_scaling", "partial_rotary_factor")
HEADS = ("attention", "n_kv_head", "head_dim", "v_head_dim", "qk_norm_eps", "window", "rope")
PER_LAYER = HEADS + ROPE_ONLY + LATENT_ONLY + GROUPED_ONLY + ("n_query_head", "bias", "attn_pdrop")
"""Flags of the attention, which an entry of `layers` may change."""


def layer(flags: "ModelOptions", changes: dict[str, Any]) -> AttentionConfig:
    """Return the attention of one layer: the common flags with this layer's changes."""
    kinds = {field.name: field.type for field in fields(flags) if field.name in PER_LAYER}
    for name, value in changes.items():
        if name not in kinds:
            raise ConfigError(f"model.layers: unknown key {name!r}.{nearest(name, list(kinds))}")
        if name != "rope_scaling":  # decoded by _rope
            _decoded(kinds[name], value, f"model.layers: {name}")
    if changes.get("rope") is False:
        changes = dict.fromkeys(ROPE_ONLY) | changes  # those of the other layers
    changed = replace(flags, **_of_others(flags, changes), **changes)
    kind = variant(changed)
    if kind is LatentConfig:
        return _latent(changed)
    return _grouped(changed) if kind is GroupedConfig else _other(changed, kind)


def _of_others(flags: "ModelOptions", changes: dict[str, Any]) -> dict[str, Any]:
    """Return, as not given, the common flags that this layer's attention does not read and another layer's does."""
    here = variant(replace(flags, attention=changes.get("attention", flags.attention)))
    kinds = {
        variant(replace(flags, attention=other.get("attention", flags.attention)))
        for other in flags.layers or ()
    }
    return {
        name: getattr(type(flags), name)
        for name in (*LATENT_ONLY, *GROUPED_ONLY)
        if name not in changes and not _reads(here, name) and any(_reads(kind, name) for kind in kinds)
    }


def _reads(kind: Variant, name: str) -> bool:
    if kind in (GroupedConfig, LatentConfig):
        return name in (GROUPED_ONLY if kind is GroupedConfig else LATENT_ONLY)
    return name in {field.name for field in fields(kind)}


def variant(flags: "ModelOptions") -> Variant:
    """Return the requested kind of attention from the registry."""
    if flags.attention is None:
        return GroupedConfig
    if flags.attention not in variants:
        raise ConfigError(
            f"model.attention={flags.attention!r} is not a known attention.{nearest(flags.attention, variants)}"
        )
    return variants[flags.attention]


def _common(flags: "ModelOptions") -> dict[str, Any]:
    return {
        "n_query_head": flags.n_query_head,
        "rope": _rope(flags),
        "window": flags.window,
        "attn_pdrop": flags.attn_pdrop,
        "qk_norm_eps": flags.qk_norm_eps,
        "qkv_bias": flags.has_biases,
        "o_bias": flags.has_biases,
    }


def _grouped(flags: "ModelOptions") -> GroupedConfig:
    refuse(flags, LATENT_ONLY, f"model.attention={flags.attention or 'mha, gqa or mqa'}")
    n_kv_head = flags.n_kv_head
    if n_kv_head is None:
        if flags.attention == "gqa":
            raise ConfigError("model.attention=gqa needs the number of KV heads. Set model.n_kv_head.")
        n_kv_head = 1 if flags.attention == "mqa" else flags.n_query_head
    if flags.score_width is not None and flags.score != "additive":
        raise ConfigError(
            f"model.score_width={flags.score_width} with score={flags.score or 'scaled_dot'}: only the additive "
            "score has hidden units. Use model.score=additive, or leave score_width out."
        )
    sizes = {} if flags.score_width is None else {"width": flags.score_width}
    config = GroupedConfig(
        **_common(flags),
        n_kv_head=n_kv_head,
        head_dim=_head_dim(flags),
        v_head_dim=chosen(flags.v_head_dim, _head_dim(flags)),
        head_map=flags.head_map or "contiguous",
        score=scores[flags.score or "scaled_dot"](**sizes),
        tie_kv=bool(flags.tie_kv),
    )
    if flags.attention not in (None, config.name):
        raise ConfigError(
            f"model.attention={flags.attention} contradicts model.n_kv_head={n_kv_head} with "
            f"n_query_head={flags.n_query_head}, which is {config.name}. Leave one of them out."
        )
    return config


def _latent(flags: "ModelOptions") -> LatentConfig:
    refuse(flags, GROUPED_ONLY, "model.attention=mla")
    head_dim = _head_dim(flags)
    rope_width = flags.qk_rope_head_dim
    if rope_width is None:
        rope_width = head_dim // 4 * 2 if flags.rotates and flags.qk_norm_eps is None else 0
    return LatentConfig(
        **_common(flags) | {"rope": _rope(flags) or False},
        n_kv_head=chosen(flags.n_kv_head, flags.n_query_head),
        kv_lora_rank=chosen(flags.kv_lora_rank, 4 * head_dim),
        q_lora_rank=flags.q_lora_rank,
        qk_nope_head_dim=chosen(flags.qk_nope_head_dim, head_dim),
        qk_rope_head_dim=rope_width,
        qk_norm_head_dim=head_dim if rope_width and flags.qk_norm_eps is not None else None,
        v_head_dim=chosen(flags.v_head_dim, head_dim),
        latent_norm=True if flags.latent_norm is None else flags.latent_norm,
    )


def _other(flags: "ModelOptions", kind: Variant) -> AttentionConfig:
    """Return the config of any other variant, whose fields are the flags of the same name; others are refused."""
    known = {field.name: field for field in fields(kind)}
    because = f"model.attention={flags.attention}"
    own = (*HEADS[1:-1], *LATENT_ONLY, *GROUPED_ONLY)
    refuse(flags, tuple(name for name in own if name not in known), because)
    values = {name: value for name, value in _common(flags).items() if name in known}
    values |= {name: value for name in own if name in known and (value := getattr(flags, name)) is not None}
    if "head_dim" in known:
        values["head_dim"] = _head_dim(flags)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{because} has no default for {name}. Set model.{name}.")
    written = encode(kind(**values))
    return _decoded(AttentionConfig, written, because)  # refused here if no checkpoint of it could be read


def _head_dim(flags: "ModelOptions") -> int:
    if flags.head_dim is not None:
        return flags.head_dim
    if flags.n_query_head < 1 or flags.n_embd % flags.n_query_head:
        raise ConfigError(
            f"model.n_query_head={flags.n_query_head} does not divide model.n_embd={flags.n_embd}: heads share "
            f"the width equally. Use one of {divisors(flags.n_embd)[:20]}, or set model.head_dim."
        )
    return flags.n_embd // flags.n_query_head


def _rope(flags: "ModelOptions") -> RopeConfig | None:
    if not flags.rotates:
        refuse(flags, ROPE_ONLY, "model.rope=False")
        return None
    scaling = _decoded(RopeScaling | None, flags.rope_scaling, "model.rope_scaling")
    theta = 10_000.0 if flags.rope_theta is None else flags.rope_theta
    share = 1.0 if flags.partial_rotary_factor is None else flags.partial_rotary_factor
    layout = flags.rope_layout or "half-split"
    return RopeConfig(theta=theta, layout=layout, scaling=scaling, partial_rotary_factor=share)


def refuse(flags: "ModelOptions", names: tuple[str, ...], because: str) -> None:
    """Raise ConfigError for flags that the model would not use."""
    for name in names:
        if getattr(flags, name) != getattr(type(flags), name):
            raise ConfigError(
                f"model.{name}={getattr(flags, name)} has no effect with {because}. Leave it out."
            )


def chosen(size: int | None, otherwise: int) -> int:
    """Return `size`, or the default of a flag that is not given."""
    return otherwise if size is None else size


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Decode a table or value from inside a flag with the checks of a config file."""
    try:
        return decode(kind, value, where)
    except InvalidInput as error:
        raise ConfigError(str(error)) from error
