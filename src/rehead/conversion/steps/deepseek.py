"""Into the shape of DeepSeek's stock classes, which every engine serves: padded with zeros, with a latent norm."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.latent import NORM_EPS
from rehead.attention.rope_scaling import LongRopeScaling
from rehead.conversion.base import (
    ExactConversion,
    R,
    S,
    Weights,
    common,
    conversions,
    in_parts,
    projections,
    with_bias,
)
from rehead.conversion.steps.latent import misfit

SMALL = -40
"""The latent is multiplied by two to this power before the identity norm; see `IdentityNorm`."""


def as_deepseek(target: AttentionConfig) -> LatentConfig | None:
    """Return `target` if it has DeepSeek's shape: a decoupled rotary part and a latent norm; else None."""
    if isinstance(target, LatentConfig) and target.qk_rope_head_dim and target.latent_norm:
        return target
    return None


class TowardsDeepSeek(ExactConversion[S, R]):
    """A step to DeepSeek's shape, and to no other."""

    def serves(self, target: AttentionConfig) -> bool:
        """Whether the target has DeepSeek's shape."""
        return as_deepseek(target) is not None


@conversions.add("decouple")
class Decouple(TowardsDeepSeek[GroupedConfig, LatentConfig]):
    """Take the rotated keys as MLA's shared rotary part, and everything else as the latent.

    Nothing is factored: the latent is the value heads themselves and, if rope is partial, the elements of the keys
    that do not rotate. Several KV heads lie side by side in the rotary part, each rotated by its own frequencies, so
    the frequencies repeat (as longrope factors). A query is zero outside the place of its own KV head.
    """

    takes = GroupedConfig
    source, target = "mqa, gqa or mha with rope", "mla with a decoupled rotary part"
    costs = (
        "The cache stays as it is; every query becomes as wide as all the keys together, plus the unrotated "
        "part, which is zero."
    )
    why = "the rotated keys are MLA's rotary part, the values are the latent"

    def steps(self, source: GroupedConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield a latent as wide as the heads; several heads only if the target's rotary part holds several."""
        wanted = as_deepseek(target)
        if wanted is None or source.rope is None or wanted.qk_nope_head_dim < unrotated(source):
            return
        rope = side_by_side(source.rope, source.n_kv_head, source.head_dim)
        together = source.head_map == "contiguous" and wanted.rope == rope
        if source.n_kv_head == 1 or together:
            yield LatentConfig(
                **common(source) | {"rope": rope},
                n_kv_head=source.n_query_head,
                kv_lora_rank=source.n_kv_head * (unrotated(source) + source.v_head_dim),
                qk_nope_head_dim=wanted.qk_nope_head_dim,
                qk_rope_head_dim=source.n_kv_head * source.rope.rotated(source.head_dim),
                latent_norm=False,
                down_bias=source.qkv_bias,
            )

    def refusal(self, source: GroupedConfig) -> str:
        """Refuse norms in the heads, learned scores and tied heads, for which DeepSeek's layout has no place."""
        return misfit(source) or ("qk_norm_eps: MLA's heads have no norm" if source.qk_norm_eps else "")

    def rewrite(self, weights: Weights, source: GroupedConfig, result: LatentConfig) -> Weights:
        """Pad the queries with zeros, rescale them, and let the expansion copy the latent."""
        n_head, n_kv_head = source.n_query_head, source.n_kv_head
        nope, v = result.qk_nope_head_dim, source.v_head_dim
        assert source.rope is not None
        rotated, still = source.rope.rotated(source.head_dim), unrotated(source)
        heads = torch.arange(n_head)
        own = heads // (n_head // n_kv_head)  # the KV head of each
        halves = (2, -1) if source.rope.layout == "half-split" else (1, -1)
        query = with_bias(weights, "q_proj").unflatten(0, (n_head, -1))  # H E D+1, of [x; 1]
        query = query * (source.scale / result.scale)
        key = with_bias(weights, "k_proj").unflatten(0, (n_kv_head, -1))
        turned = key[:, :rotated].unflatten(1, halves).transpose(0, 1)
        wide = query.new_zeros(n_head, *turned.shape)  # H 2 K E/2 D, or H 1 K E D
        wide[heads, :, own] = query[:, :rotated].unflatten(1, halves)
        plain = F.pad(query[:, rotated:], (0, 0, 0, nope - still))
        up = query.new_zeros(n_head, nope + v, n_kv_head, still + v)  # of the latent: K (E - E_r + V)
        up[heads, :still, own, :still] = torch.eye(still, dtype=query.dtype)
        up[heads, nope:, own, still:] = torch.eye(v, dtype=query.dtype)
        value, up = with_bias(weights, "v_proj").unflatten(0, (n_kv_head, -1)), up.flatten(2).flatten(0, 1)
        latent = torch.cat([key[:, rotated:], value], dim=1).flatten(0, 1)
        up = torch.cat([up, up @ latent[:, -1:]], dim=1)
        latent[:, -1] = 0
        made, biased = projections(weights, "o_proj"), source.qkv_bias
        made |= in_parts("q_proj", torch.cat([plain, wide.flatten(1, 3)], dim=1).flatten(0, 1), biased=biased)
        made |= in_parts("kv_a_proj_with_mqa", torch.cat([latent, turned.flatten(0, 2)]), biased=biased)
        return made | in_parts("kv_b_proj", up, biased=biased)


def unrotated(source: GroupedConfig) -> int:
    """Return how many numbers of a head do not rotate."""
    return source.head_dim - (source.rope.rotated(source.head_dim) if source.rope else 0)


def repeated(rope: RopeConfig, head_dim: int, width: int, pairs: list[int] | None = None) -> RopeConfig:
    """Return the rope of a rotary part of `width`: these `pairs` of the heads, by default all in turn, fastest first.

    With base 1 the factors alone determine every angle, with one rounding less.
    """
    frequencies = rope.frequencies(head_dim)
    chosen = pairs or sorted(index % len(frequencies) for index in range(width // 2))
    factors = (1 / frequencies[torch.tensor(chosen)]).tolist()
    scaling = LongRopeScaling(factors=tuple(factors), attention_factor=rope.magnitude)
    return RopeConfig(theta=1.0, layout=rope.layout, scaling=scaling)


def side_by_side(rope: RopeConfig, n_head: int, width: int) -> RopeConfig:
    """Return the rope of `n_head` heads of `width` in one part: the frequencies of each, one head after another."""
    if n_head == 1:
        return replace(rope, partial_rotary_factor=1.0)
    n_pair = rope.rotated(width) // 2
    return repeated(rope, width, 2 * n_head * n_pair, n_head * list(range(n_pair)))


@conversions.add("pad-to-stock")
class PadToStock(TowardsDeepSeek[LatentConfig, LatentConfig]):
    """Widen the latent, heads and rotary part with zeros to the sizes that an engine's kernels are built for.

    In a rotary part c times as wide, pair c f has the angles that pair f had: base ** (-2 (c f) / (c d)).
    """

    takes = LatentConfig
    source, target = "mla without latent norm", "mla of DeepSeek's sizes"
    costs = "The cache grows to the new rank and rotary part; zeros in the heads cost no cache."
    why = "the new numbers are 0"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield all sizes at once."""
        wanted = as_deepseek(target)
        if wanted is None or source.rebuilds_keys or source.n_kv_head != source.n_query_head:
            return
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")
        grown = {name: getattr(wanted, name) for name in sizes}
        fits = all(size >= getattr(source, name) for name, size in grown.items())
        rotated, part = source.qk_rope_head_dim, wanted.qk_rope_head_dim
        plain = (
            source.rope is None or source.rope.scaling is None
        )  # scaled angles would differ in a wider part
        if fits and (rotated in (0, part) or (plain and part % rotated == 0)):
            wider = replace(source, **grown, rope=source.rope or wanted.rope)
            if wider != source:
                yield wider

    def refusal(self, source: LatentConfig) -> str:
        """Refuse latent norms, norms on queries and keys, and query latents."""
        if source.latent_norm:
            return "latent_norm=True would average over the zeros"
        if source.qk_norm_eps is not None:
            return "qk_norm_eps: MLA's heads have no norm"
        if source.q_lora_rank is not None:
            return "queries with a latent are not widened"
        return ""

    def rewrite(self, weights: Weights, source: LatentConfig, result: LatentConfig) -> Weights:
        """Append zeros to every part, and between the pairs of the rotary part."""
        heads, nope, v = source.n_query_head, source.qk_nope_head_dim, source.v_head_dim
        more_rank = result.kv_lora_rank - source.kv_lora_rank
        more_nope, more_v = result.qk_nope_head_dim - nope, result.v_head_dim - v
        query = with_bias(weights, "q_proj").unflatten(0, (heads, -1))
        query = query * (source.scale / result.scale)
        parts = [
            F.pad(query[:, :nope], (0, 0, 0, more_nope)),
            interleave_rows(query[:, nope:], result, source),
        ]
        down = with_bias(weights, "kv_a_proj_with_mqa")
        latent, rope = down[: source.kv_lora_rank], down[source.kv_lora_rank :]
        # The bias comes first, so that zeros follow the latent.
        expanding = with_bias(weights, "kv_b_proj").roll(1, dims=1)
        keys, values = expanding.unflatten(0, (heads, -1)).split([nope, v], dim=1)
        up = [F.pad(keys, (0, more_rank, 0, more_nope)), F.pad(values, (0, more_rank, 0, more_v))]
        output = weights["o_proj.weight"].unflatten(1, (heads, -1))
        down = torch.cat(
            [F.pad(latent, (0, 0, 0, more_rank)), interleave_rows(rope[None], result, source)[0]]
        )
        wider = {
            **in_parts("q_proj", torch.cat(parts, dim=1).flatten(0, 1), biased=source.qkv_bias),
            **in_parts("kv_a_proj_with_mqa", down, biased=source.down_bias),
            **in_parts(
                "kv_b_proj", torch.cat(up, dim=1).flatten(0, 1).roll(-1, dims=1), biased=source.qkv_bias
            ),
            "o_proj.weight": F.pad(output, (0, more_v)).flatten(1),
        }
        return weights | wider


def interleave_rows(
    rows: Float[Tensor, "H P D"], result: LatentConfig, source: LatentConfig
) -> Float[Tensor, "H Q D"]:
    """Return rotated rows in a part c times as wide: pair f moves to place c f."""
    width, wider = rows.shape[1], result.qk_rope_head_dim
    made = rows.new_zeros(len(rows), wider, rows.shape[2])
    if width:
        places = torch.arange(width // 2) * (wider // width)
        interleaved = source.rope is not None and source.rope.layout == "interleaved"
        first = 2 * places if interleaved else places
        second = first + (1 if interleaved else wider // 2)
        made[:, first] = rows[:, 0::2] if interleaved else rows[:, : width // 2]
        made[:, second] = rows[:, 1::2] if interleaved else rows[:, width // 2 :]
    return made


@conversions.add("identity-norm")
class IdentityNorm(TowardsDeepSeek[LatentConfig, LatentConfig]):
    """Give a latent the norm that DeepSeek's classes require, with weights that undo it.

    The latent c is scaled to 2**-40 c, so small that the norm divides by the root of its eps (1e-6) alone. Its output
    is c times a constant, with a relative error of at most (2**-40 rms(c))**2 / 2e-6: below the rounding of float32
    for an RMS of c up to 300,000. The zeros of a padded latent do not affect it. float16 cannot hold numbers this
    small; an export replaces them (`conversion.export.storable`).
    """

    takes = LatentConfig
    source, target = "mla without latent norm", "mla with one"
    costs = "Nothing."
    why = "the norm divides by its eps, and the weights multiply by it"

    def steps(self, source: LatentConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the same with a latent norm."""
        if as_deepseek(target) is not None:
            yield replace(source, latent_norm=True)

    def refusal(self, source: LatentConfig) -> str:
        """Refuse a latent that has a norm."""
        return "latent_norm=True already" if source.latent_norm else ""

    def rewrite(self, weights: Weights, source: LatentConfig, result: LatentConfig) -> Weights:
        """Choose a power of two for the norm's weight, so that cached numbers keep about their size."""
        rank, root = source.kv_lora_rank, math.sqrt(NORM_EPS)
        restored = round(math.log2(root)) - SMALL  # the weight 2**restored, after 2**SMALL / root
        down = with_bias(weights, "kv_a_proj_with_mqa")
        down[:rank] *= 2.0**SMALL
        made = {
            **in_parts("kv_a_proj_with_mqa", down, biased=source.down_bias),
            "kv_a_layernorm.weight": torch.full((rank,), 2.0**restored, dtype=down.dtype),
            "kv_b_proj.weight": weights["kv_b_proj.weight"] * (root / 2.0 ** (SMALL + restored)),
        }
        return weights | made
