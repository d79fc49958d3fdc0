"""What a user asks for (`--to mla --kv-fraction 0.5`), and the attention it means for one layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.attention.grouped_config import HeadMap, divisors
from rehead.attention.rope import Layout
from rehead.config import GPTConfig
from rehead.conversion import rotary
from rehead.conversion.base import common, heads_of
from rehead.conversion.steps.latent import full_rank
from rehead.errors import ConfigError
from rehead.fields import require_types
from rehead.registry import Registry, nearest

Kind = Literal["canonical", "uneven", "rebuilt"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The attention to convert to; what is None stays as it is.

    `to` is one of `targets`, `n_kv_head` the number of KV heads, `kv_rank` or `kv_fraction` (of the source's
    cache) the width of the latent. `target` is the kind of MLA that rotary attention becomes: `rebuilt` keys, rotated
    as a whole; or a decoupled rotary part: of `rope_dim` numbers, with the frequencies that matter most (`uneven`), or
    of 64 numbers with those of DeepSeek's class (`canonical`). The latent and that part together are then
    `kv_fraction`.
    """

    to: str | None = None
    target: Kind | None = None
    rope_dim: int | None = None
    n_kv_head: int | None = None
    kv_rank: int | None = None
    kv_fraction: float | None = None
    head_map: HeadMap | None = None
    rope_layout: Layout | None = None

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self)
        if self.kv_fraction is not None and not 0 < self.kv_fraction <= 1:
            raise ConfigError(
                f"kv_fraction={self.kv_fraction}: a share of the source's cache. Use a number above 0 up to 1."
            )
        if self.kv_rank is not None and self.kv_fraction is not None:
            raise ConfigError(
                f"kv_rank={self.kv_rank} and kv_fraction={self.kv_fraction} say the same thing. Give one."
            )

    def attention(self, source: AttentionConfig, d_model: int) -> AttentionConfig:
        """Return the attention that replaces `source`. Raises ConfigError for a target that makes no sense for it."""
        self._refuse_unread()
        made = source if self.to is None else targets[self.to](self, source, d_model)
        if self.head_map is not None:
            if not isinstance(made, GroupedConfig):
                raise ConfigError(f"head_map={self.head_map} means nothing for {made.name}. Leave it out.")
            made = replace(made, head_map=self.head_map)
        if self.rope_layout is not None and made.rope is not None:
            made = replace(made, rope=replace(made.rope, layout=self.rope_layout))
        return made

    def _refuse_unread(self) -> None:
        for name, readers in READERS.items():
            value = getattr(self, name)
            if value is not None and self.to not in readers:
                instead = "without --to" if self.to is None else f"with --to {self.to}"
                raise ConfigError(
                    f"{name}={value} means nothing {instead}. Use it with --to {' or '.join(readers)}."
                )

    def rank(self, source: GroupedConfig | LatentConfig, made: LatentConfig, d_model: int) -> int:
        """Return the width of the latent in `made`, which has any: as wide as exactness needs, unless given."""
        full = full_rank(replace(source, n_kv_head=min(made.n_kv_head, source.n_kv_head)), d_model)
        if self.kv_fraction is not None:
            total = max(1, math.floor(self.kv_fraction * source.kv_numbers()))
            beside = made.kv_numbers() - made.kv_lora_rank
            if total <= beside:
                raise ConfigError(
                    f"kv_fraction={self.kv_fraction} is {total} numbers, and {beside} stay beside the latent: none are "
                    "left for it. Use a larger --kv-fraction."
                )
            return min(total - beside, full)
        if self.kv_rank is not None and not 1 <= self.kv_rank <= full:
            raise ConfigError(
                f"kv_rank={self.kv_rank}: {full} numbers hold all keys and values exactly, more would be zeros. "
                f"Use 1 to {full}."
            )
        return full if self.kv_rank is None else self.kv_rank


LATENT = ("mla", "reduced")
READERS = {
    "n_kv_head": ("gqa", "mla"),
    "kv_rank": LATENT,
    "kv_fraction": LATENT,
    "target": ("mla",),
    "rope_dim": ("mla",),
}
"""Which values of `to` read the other fields."""
targets: Registry[Callable[[Target, AttentionConfig, int], AttentionConfig]] = Registry("target")


def _grouped(source: AttentionConfig, n_kv_head: int) -> GroupedConfig:
    heads = heads_of(source)
    if isinstance(heads, GroupedConfig):
        return replace(heads, n_kv_head=n_kv_head)
    if heads.qk_rope_head_dim:
        raise ConfigError(
            f"qk_rope_head_dim={heads.qk_rope_head_dim}: the heads of this MLA rotate in part only. Convert the model "
            "it was made from."
        )
    return GroupedConfig(**common(heads), n_kv_head=n_kv_head, head_dim=heads.qk_nope_head_dim)


@targets.add("mha")
def _mha(target: Target, source: AttentionConfig, d_model: int) -> AttentionConfig:
    return _grouped(source, heads_of(source).n_query_head)


@targets.add("mqa")
def _mqa(target: Target, source: AttentionConfig, d_model: int) -> AttentionConfig:
    return _grouped(source, 1)


@targets.add("gqa")
def _gqa(target: Target, source: AttentionConfig, d_model: int) -> AttentionConfig:
    heads = heads_of(source)
    n_kv_head = heads.n_kv_head if target.n_kv_head is None else target.n_kv_head
    if not 1 < n_kv_head < heads.n_query_head:
        between = divisors(heads.n_query_head)[1:-1][:20]
        if not between:
            raise ConfigError(
                f"--to gqa: no number between 1 and {heads.n_query_head} divides {heads.n_query_head} query "
                "heads. Use --to mqa or --to mha."
            )
        if target.n_kv_head is None:  # and the source is none either
            raise ConfigError(f"--to gqa needs --n-kv-head: how many KV heads? Use one of {between}.")
        raise ConfigError(
            f"n_kv_head={n_kv_head} does not make a gqa of {heads.n_query_head} query heads. Use one of {between}."
        )
    return _grouped(source, n_kv_head)


@targets.add("mla")
def _mla(target: Target, source: AttentionConfig, d_model: int) -> AttentionConfig:
    heads = heads_of(source)
    n_kv_head = heads.n_kv_head if target.n_kv_head is None else target.n_kv_head
    if isinstance(heads, LatentConfig):
        if target.target == "rebuilt" and heads.qk_rope_head_dim:
            raise ConfigError(
                "target=rebuilt: this MLA has a rotary part beside its latent, so it rebuilds nothing. Leave it out, "
                "or convert the model it was made from."
            )
        exact = target.kv_rank is None and target.kv_fraction is None
        made = replace(heads, n_kv_head=n_kv_head)
        return made if exact else replace(made, kv_lora_rank=target.rank(heads, made, d_model))
    if target.target in ("uneven", "canonical") and heads.rope is not None:
        if n_kv_head != heads.n_kv_head:
            raise ConfigError(
                f"n_kv_head={n_kv_head} means nothing with --target {target.target}, whose latent expands to the "
                f"{heads.n_kv_head} KV heads there are. Leave it out, or convert with --to gqa first."
            )
        return rotary.decoupled(
            heads, target.target, target.rope_dim, target.kv_rank, target.kv_fraction, d_model
        )
    if target.rope_dim is not None and target.target not in ("uneven", "canonical"):
        raise ConfigError(
            f"rope_dim={target.rope_dim} means nothing for rebuilt keys, which rotate as a whole. Use it with "
            "--target uneven."
        )
    made = LatentConfig(
        **common(heads),
        n_kv_head=n_kv_head,
        kv_lora_rank=1,
        qk_nope_head_dim=heads.head_dim,
        latent_norm=False,
    )
    return replace(made, kv_lora_rank=target.rank(heads, made, d_model))


@targets.add("reduced")
def _reduced(target: Target, source: AttentionConfig, d_model: int) -> AttentionConfig:
    """Return the reduced form of the latent of `mla`."""
    latent = _mla(target, source, d_model)
    assert isinstance(latent, LatentConfig)
    wide = common(latent) | {"v_head_dim": latent.kv_lora_rank, "rope": None}
    return GroupedConfig(
        **wide | {"o_bias": latent.o_bias or latent.qkv_bias},
        n_kv_head=1,
        head_dim=latent.kv_lora_rank,
        tie_kv=True,
    )


def layers_of(
    config: GPTConfig,
    to: str | AttentionConfig | Sequence[AttentionConfig] | GPTConfig,
    options: dict[str, Any],
) -> Sequence[AttentionConfig]:
    """Return the attention of every layer for the arguments of `rehead.convert`: a name or configs."""
    known = [field.name for field in fields(Target)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}.{nearest(name, known)}")
    if isinstance(to, str):
        asked = Target(to=to, **options)
        return [asked.attention(layer, config.n_embd) for layer in config.attention]
    if options:
        raise ConfigError(
            f"{', '.join(options)} beside a config, which already defines it. Give one of them."
        )
    if isinstance(to, GPTConfig):
        if replace(to, attention=config.attention) != config:
            raise ConfigError(
                "the two models differ beyond their attention: conversions change nothing else."
            )
        return to.attention
    several = to if isinstance(to, Sequence) else [to]
    layers = [one for one in several if isinstance(one, AttentionConfig)]
    if len(layers) != len(several):
        raise ConfigError(
            f"to={to!r:.80}: expected a name ({', '.join(targets)}), an attention's config, one per layer, or a "
            'model\'s config. Use "mla", for example.'
        )
    if isinstance(to, AttentionConfig):
        layers *= config.n_layer
    if len(layers) != config.n_layer:
        raise ConfigError(
            f"{len(layers)} attentions for {config.n_layer} layers: give one per layer, or one."
        )
    return layers
