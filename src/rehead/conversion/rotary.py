"""The rotary part of an MLA made from rotary heads: how wide it is, and which frequencies it has."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion.base import common, heads_of
from rehead.conversion.steps.deepseek import repeated
from rehead.conversion.steps.latent import other_norms
from rehead.conversion.steps.rotations import all_rotated, beside
from rehead.conversion.yarn import as_yarn
from rehead.errors import ConfigError

SHARE = 4
"""The rotary part is a quarter of the cache where no width is given: better than a third of SmolLM2-135M's."""
SERVED, RANKS = 64, (512, 256)
"""The rotary part and the latents that native MLA kernels know."""


def decoupled(
    heads: GroupedConfig,
    kind: Literal["canonical", "uneven"],
    rope_dim: int | None,
    kv_rank: int | None,
    kv_fraction: float | None,
    d_model: int,
) -> LatentConfig:
    """Return an MLA with a rotary part for rotary `heads`.

    The frequencies of `uneven` are placeholders: as many of the fastest as fit, alike for all KV heads. Those that
    matter are chosen on a text.
    """
    assert heads.rope is not None
    scales = 0 if heads.qk_norm_eps is None else heads.n_kv_head  # beside the latent and the rotary part
    numbers, most = heads.kv_numbers(), all_rotated(heads)
    total = None if kv_fraction is None else int(kv_fraction * numbers)
    if total is not None and total < 4 + scales:
        raise ConfigError(
            f"kv_fraction={kv_fraction} is {total} of {numbers} numbers, and a rotary part and a latent"
            f"{_norms(scales)} take {4 + scales} or more. Use a larger --kv-fraction."
        )
    if kind == "canonical":
        width, rope = _canonical(heads, rope_dim)
        if total is None and kv_rank is None:
            smaller = next((rank for rank in RANKS if rank + SERVED < numbers), None)
            if smaller is None:
                raise ConfigError(
                    f"{RANKS[-1]} + {SERVED} numbers, the least that engines' MLA kernels know, are no fewer than the "
                    f"{numbers} that this attention caches. Use --kv-fraction for a smaller one, or --target uneven."
                )
            kv_rank = min(smaller, beside(heads, width, d_model)[1])
    else:
        width = most if rope_dim is None else rope_dim
        if rope_dim is None and total is not None:
            width = _shared(heads, total - scales, d_model)
        elif rope_dim is None and kv_rank is not None:  # a quarter of both together
            width = min(most, max(2, kv_rank // (SHARE - 1) // 2 * 2))
        if not (2 <= width <= most and width % 2 == 0):
            raise ConfigError(
                f"rope_dim={width}: pairs of the {most} numbers that rotate in all KV heads. Use an even number, 2 to "
                f"{most}."
            )
        rope = repeated(heads.rope, heads.head_dim, width)
    nope, full = beside(heads, width, d_model)
    if total is None:
        rank = min(full, numbers - width - scales) if kv_rank is None else kv_rank
        _require_needed(rank, full, width, scales, numbers)
    else:
        rank = min(full, total - width - scales)
    if not rank >= 1:
        raise ConfigError(
            f"kv_fraction={kv_fraction} is {total} numbers, of which {width} are the rotary part{_norms(scales)}: none "
            "are left for the latent. Use a larger --kv-fraction, or a smaller --rope-dim."
        )
    return LatentConfig(
        **common(heads) | {"rope": rope},
        n_kv_head=heads.n_kv_head,
        kv_lora_rank=rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=width,
        latent_norm=False,
        qk_norm_head_dim=heads.head_dim if scales else None,
        down_bias=heads.qkv_bias,
    )


def require_one_rotation(layers: Iterable[AttentionConfig]) -> None:
    """Refuse layers that rotate in different ways: the frequencies of `uneven` are chosen for all of them together."""
    heads = [one for one in map(heads_of, layers) if isinstance(one, GroupedConfig) and one.rope is not None]
    if len({(one.rope, one.head_dim, one.n_kv_head) for one in heads}) > 1:
        raise ConfigError(
            "the layers rotate in different ways: one rotary part cannot serve all. Use --target rebuilt."
        )


def _shared(heads: GroupedConfig, total: int, d_model: int) -> int:
    """Return the width of the rotary part in a cache of `total` numbers: a quarter, and what the latent cannot use."""
    most = all_rotated(heads)
    if most + beside(heads, most, d_model)[1] <= total:
        return most
    width = min(most, max(2, total // SHARE // 2 * 2))
    spare = total - width - beside(heads, width, d_model)[1]
    return min(most, width + max(0, spare) // 2 * 2)


def _norms(scales: int) -> str:
    return f" and {scales} the norms of keys" if scales else ""


def _require_needed(rank: int, full: int, width: int, scales: int, numbers: int) -> None:
    """Refuse a latent with numbers that are always zero, and a cache that is larger than that of the heads."""
    if not 1 <= rank <= full:
        raise ConfigError(
            f"kv_rank={rank}: {full} numbers beside a rotary part of {width} hold all keys and values exactly, more "
            f"would be zeros. Use 1 to {min(full, numbers - width - scales)}."
        )
    if rank + width + scales > numbers:
        beside = (
            f", a rotary part of {width} and {scales} norms" if scales else f" and a rotary part of {width}"
        )
        raise ConfigError(
            f"a latent of {rank}{beside} are {rank + width + scales} numbers per token, more than the {numbers} that "
            f"this attention caches. Use --kv-rank {max(1, numbers - width - scales)} or less, or a smaller --rope-dim."
        )


def _canonical(heads: GroupedConfig, rope_dim: int | None) -> tuple[int, RopeConfig]:
    """Return the width and the angles of a rotary part that engines know: every c-th pair of a head."""
    assert heads.rope is not None
    if norms := other_norms(heads):
        raise ConfigError(f"{norms}. Keep it as it is.")
    if heads.qk_norm_eps is not None:
        raise ConfigError(
            "the queries and keys have norms, which DeepseekV3ForCausalLM lacks. Use --target uneven or rebuilt."
        )
    if rope_dim is not None:
        raise ConfigError(
            f"rope_dim={rope_dim}: the rotary part of --target canonical is {SERVED} wide. Leave it out."
        )
    rotated = heads.rope.rotated(heads.head_dim)
    width = min(SERVED, rotated)
    if rotated % width or SERVED % width:
        raise ConfigError(
            f"heads of which {rotated} numbers rotate have no angles of a rotary part of {SERVED}. Use --target uneven."
        )
    if heads.qkv_bias or heads.o_bias:
        raise ConfigError(
            "its attention has biases, which vLLM's and SGLang's DeepseekV3ForCausalLM leave out. Use "
            "--target uneven."
        )
    if heads.rope.scaling is None:
        return width, replace(heads.rope, partial_rotary_factor=1.0)
    yarn = as_yarn(heads.rope, width) if width == SERVED else None
    if yarn is None:
        raise ConfigError("scaled rope: native MLA kernels compute other angles. Use --target uneven.")
    return width, yarn
