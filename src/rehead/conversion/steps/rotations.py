"""Some directions of the keys rotated, for all heads together, and the others not: MLA with a decoupled rotary part."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Complex128, Float64
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion.base import (
    Conversion,
    Converted,
    Promise,
    Statistics,
    Weights,
    common,
    conversions,
    in_parts,
    projections,
    with_bias,
)
from rehead.conversion.fit.directions import TINY, Directions
from rehead.conversion.fit.turns import REACH, angles, pairs
from rehead.conversion.steps.latent import misfit, norm_weights
from rehead.conversion.yarn import FAR, drift, stands_in

SAME = 1e-6
"""Relative difference below which two frequencies count as the same."""
NEAR = 256
"""Distances in tokens, from 0 on, that count alike where no text says which matter."""


def slots_of(source: GroupedConfig, rope: RopeConfig, width: int) -> list[int] | None:
    """Return for each pair of a rotary part the pair of the source's heads with its frequency; None if one has none.

    A pair of the heads can be used once per KV head. A yarn that stands in for the source's scaling counts as equal.
    """
    own = source.rope
    assert own is not None
    if stands_in(rope, own, width):
        rope, own = replace(rope, scaling=None), replace(own, scaling=None)
    have = own.frequencies(source.head_dim)
    wanted = rope.frequencies(width)
    rising, pair = have.sort()
    above = torch.searchsorted(rising, wanted).clamp(max=len(have) - 1)
    around = torch.stack([above, (above - 1).clamp(min=0)])  # the nearest is one of both
    distance, which = (wanted / rising[around] - 1).abs().min(dim=0)
    slots = pair[around.gather(0, which[None])[0]].tolist()
    fits = bool((distance < SAME).all()) and max(Counter(slots).values()) <= source.n_kv_head
    return slots if fits else None


@conversions.add("keep-rotations")
class KeepRotations(Conversion[GroupedConfig, LatentConfig]):
    """Rotate some directions of the keys, shared by all heads, and leave the rest unrotated in a latent.

    At each frequency, the keys of all KV heads form a vector of complex numbers, and rotation multiplies it by a
    single number, whatever the basis. The directions whose rotation affects the predictions most (by gradients on
    a text) become MLA's rotary part, as many as the target's has pairs of this frequency. Keys of a frequency that
    the target lacks turn by one near it, along common directions, if that is better than standing still. In the
    scores of the other directions, a constant replaces the rotation: its mean over the distances that matter.
    Queries change to match. Llama 3's scaled angles may become those of a yarn, a few of which differ. Biases are
    kept, except those of unrotated keys that only add the same number to all scores of a query. With norms on
    queries and keys (Qwen3), the cache also holds 1 / RMS of the source's keys. `weighted` measures on a text what
    matters; `svd` keeps what is large in the weights, with all near distances counting alike.
    """

    takes = GroupedConfig
    source, target = "mqa, gqa or mha with rope", "mla with a decoupled rotary part and an unfactored latent"
    costs = "The rotary part is added to the cache; what is not rotated decodes absorbed and can be made narrower."
    methods: ClassVar[dict[str, tuple[str, ...]]] = {"weighted": ("turns",), "svd": ()}
    fitted = frozenset({"weighted"})

    def steps(self, source: GroupedConfig, target: AttentionConfig, d_model: int) -> Iterator[LatentConfig]:
        """Yield the target's rotary part beside a latent that holds all the rest."""
        if not isinstance(target, LatentConfig) or source.rope is None or target.rope is None:
            return
        width = target.qk_rope_head_dim
        if not width or source.head_map != "contiguous" or target.rope.layout != source.rope.layout:
            return
        if slots_of(source, target.rope, width) is None:
            return
        nope, rank = beside(source, width, d_model)
        yield LatentConfig(
            **common(source) | {"rope": target.rope},
            n_kv_head=source.n_kv_head,
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=width,
            qk_norm_head_dim=None if source.qk_norm_eps is None else source.head_dim,
            latent_norm=False,
            down_bias=source.qkv_bias,
        )

    def serves(self, target: AttentionConfig) -> bool:
        """Whether the target has a decoupled rotary part."""
        return isinstance(target, LatentConfig) and target.qk_rope_head_dim > 0

    def promise(self, source: GroupedConfig, result: LatentConfig, d_model: int) -> Promise:
        """Promise exactness if all pairs of all KV heads keep their rotation, by the same angles."""
        every, width = all_rotated(source), result.qk_rope_head_dim
        why = "all keys" if width == every else f"{width} of the {every} rotated numbers"
        why += " keep their rotation"
        if off := _off(source, result):
            why += f", by a yarn's angles, up to {off:.2f} rad off after {FAR:,} tokens"
        return Promise(exact=width == every and not off, why=why)

    def refusal(self, source: GroupedConfig) -> str:
        """Refuse learned scores, other norms than of heads and tied heads, for which MLA's layout has no place."""
        return misfit(source)

    def convert(
        self,
        weights: Weights,
        source: GroupedConfig,
        result: LatentConfig,
        statistics: Statistics,
        method: str,
    ) -> Converted:
        """Change the basis of the keys, and of the queries with them; the rest and the values become the latent."""
        assert source.rope is not None
        assert result.rope is not None
        n_kv_head, layout = source.n_kv_head, source.rope.layout
        slots = slots_of(source, result.rope, result.qk_rope_head_dim)
        assert slots is not None
        every = result.qk_rope_head_dim == all_rotated(source)
        seen = statistics if method in self.fitted else Statistics()
        asked, (held, sizes) = queries_of(weights, source), keys_of(weights, source, seen)
        values = with_bias(weights, "v_proj")  # of [x; 1], as the keys
        query = complex_pairs(asked, source.n_query_head, source.rope)  # H F D+1
        key = complex_pairs(held, n_kv_head, source.rope)  # K F D+1
        found = directions(weights, source, seen, exact=every)
        part = found.rotated(query, key, slots)
        asking = part.queries * (source.rope.magnitude / result.rope.magnitude) ** 2
        still = query * found.constant.conj()[:, :, None] * source.rope.magnitude**2
        unrotated = slice(source.rope.rotated(source.head_dim), None)
        plain = asked.unflatten(0, (source.n_query_head, -1))[:, unrotated]
        keys = held.unflatten(0, (n_kv_head, -1))[:, unrotated]
        if not every:
            plain = torch.cat([real_pairs(still, layout), plain], dim=1)
            keys = torch.cat([real_pairs(part.left, layout), keys], dim=1)
        padding = (0, 0, 0, result.qk_nope_head_dim - keys.shape[1])  # 1, the least, where all rotates
        queries = torch.cat([F.pad(plain, padding), real_pairs(asking, layout)], dim=1)
        del asked, query, asking, still, plain  # of a large layer, gigabytes
        queries *= source.scale / result.scale
        queries *= sizes.repeat_interleave(source.group)[:, None, None]
        if source.qk_norm_eps is None:
            keys[:, :, -1] = 0  # the bias adds one number to all scores of a query
            made = in_parts("q_proj", queries.flatten(0, 1), biased=source.qkv_bias)
        else:
            made = {
                "q_up_proj.weight": queries.flatten(0, 1),
                "q_norm.weight": sizes.new_ones(source.head_dim),
            }
            made |= projections(weights, "q_proj")
            made |= {f"k_scale_{name[2:]}": w for name, w in projections(weights, "k_proj").items()}
        made |= _latent(
            keys, values.unflatten(0, (n_kv_head, -1)), real_pairs(part.keys[None], layout)[0], result
        )
        still_there = float(part.left.abs().square().sum() / key.abs().square().sum().clamp(min=TINY))
        return Converted(
            weights=made | projections(weights, "o_proj"),
            lost=max(0.0, 1 - part.saves / found.matters) if found.matters else 0.0,
            residual=max(still_there, _off(source, result)),
        )


def _off(source: GroupedConfig, result: LatentConfig) -> float:
    """Return how far the result's angles are off, in radians after `FAR` tokens; 0 unless a yarn stands in."""
    assert source.rope is not None
    assert result.rope is not None
    width = result.qk_rope_head_dim
    is_other = stands_in(result.rope, source.rope, width)
    return drift(result.rope, source.rope, width) if is_other else 0.0


def all_rotated(source: GroupedConfig) -> int:
    """Return the width of a rotary part in which all keys keep their rotation."""
    assert source.rope is not None
    return source.n_kv_head * source.rope.rotated(source.head_dim)


def beside(source: GroupedConfig, width: int, d_model: int) -> tuple[int, int]:
    """Return the unrotated width of a head beside a rotary part of `width`, and the rank that holds all the rest."""
    kept = all_rotated(source) // source.n_kv_head if width == all_rotated(source) else 0
    nope = source.head_dim - kept
    return max(1, nope), min(source.n_kv_head * (nope + source.v_head_dim), source.d_context or d_model)


def _latent(
    keys: Float64[Tensor, "K N D"],
    values: Float64[Tensor, "K V D"],
    turned: Float64[Tensor, "P D"],
    result: LatentConfig,
) -> Weights:
    """Return the projections to and from a latent that holds everything, and to the rotary part, all of [x; 1]."""
    stack = torch.cat([keys, values], dim=1)
    padding = (0, 0, result.qk_nope_head_dim - keys.shape[1], 0)
    rows, bias = stack.flatten(0, 1)[:, :-1], stack[:, :, -1:]
    identity = torch.eye(result.kv_lora_rank, dtype=rows.dtype)
    up, down = (identity, rows) if len(rows) == result.kv_lora_rank else (rows, identity)
    expanding = torch.cat([up.unflatten(0, stack.shape[:2]), bias], dim=2)
    latent = torch.cat([F.pad(down, (0, 1)), turned])
    return in_parts("kv_b_proj", F.pad(expanding, padding).flatten(0, 1), biased=result.qkv_bias) | in_parts(
        "kv_a_proj_with_mqa", latent, biased=result.down_bias
    )


def directions(
    weights: Weights, source: GroupedConfig, statistics: Statistics, *, exact: bool = False
) -> Directions:
    """Return the directions of a layer's keys, by its weights if there are no statistics; any if `exact`."""
    assert source.rope is not None
    key = complex_pairs(keys_of(weights, source, statistics)[0], source.n_kv_head, source.rope)
    if exact:
        shape = (*key.shape[:2], *key.shape[:2])
        each = torch.eye(key.shape[0] * key.shape[1], dtype=key.dtype).view(shape)
        return Directions(_standing(source), each)
    if statistics.turns is None or statistics.inputs is None:
        return Directions(_by_weights(weights, source), torch.einsum("kfd,jgd->kfjg", key, key.conj()))
    seen = statistics.inputs.to(key.dtype)
    return Directions(statistics.turns, torch.einsum("kfd,jgd->kfjg", key @ seen, key.conj()))


def _standing(source: GroupedConfig) -> Float64[Tensor, "S H F"]:
    """Return `turns` of pairs whose rotation matters alike, and for which no constant stands in."""
    assert source.rope is not None
    n_pair = source.rope.rotated(source.head_dim) // 2
    turns = torch.zeros(1 + 2 * (1 + 2 * REACH), source.n_query_head, n_pair, dtype=torch.float64)
    turns[0] = 1
    return turns


def _by_weights(weights: Weights, source: GroupedConfig) -> Float64[Tensor, "S H F"]:
    """Return `turns` estimated without a text: all input directions and all distances below `NEAR` count alike."""
    assert source.rope is not None
    query = complex_pairs(queries_of(weights, source), source.n_query_head, source.rope)
    key = complex_pairs(keys_of(weights, source, Statistics())[0], source.n_kv_head, source.rope)
    size = query.abs().square().sum(-1) * key.abs().square().sum(-1).repeat_interleave(source.group, dim=0)
    angle = torch.arange(NEAR) * angles(source.rope.frequencies(source.head_dim))[:, :, None]
    cos, sin = angle.cos().mean(2), -angle.sin().mean(2)
    return torch.cat([size[None], size * cos[:, None], size * sin[:, None]])


def queries_of(weights: Weights, source: GroupedConfig) -> Float64[Tensor, "HE N"]:
    """Return the rows that make queries: of [x; 1] or, with norms, of the normed head."""
    if source.qk_norm_eps is None:
        return with_bias(weights, "q_proj")
    return norm_weights(weights, source)["q_norm.weight"].diag().repeat(source.n_query_head, 1)


def keys_of(
    weights: Weights, source: GroupedConfig, statistics: Statistics
) -> tuple[Float64[Tensor, "KE D"], Float64[Tensor, " K"]]:
    """Return the rows of [x; 1] that make keys, divided by each head's size if there are norms, and these sizes.

    A size is the RMS of the head's keys over the text; without statistics, over inputs with all directions alike.
    """
    held = with_bias(weights, "k_proj")
    if source.qk_norm_eps is None:
        return held, held.new_ones(source.n_kv_head)
    heads = held.unflatten(0, (source.n_kv_head, -1))
    seen = torch.eye(held.shape[1], dtype=held.dtype) if statistics.inputs is None else statistics.inputs
    sizes = torch.einsum("ked,df,kef->k", heads, seen, heads).div(source.head_dim).clamp(min=TINY).sqrt()
    normed = heads * norm_weights(weights, source)["k_norm.weight"][:, None] / sizes[:, None, None]
    return normed.flatten(0, 1), sizes


def complex_pairs(
    rows: Float64[Tensor, "HE D"], n_head: int, rope: RopeConfig
) -> Complex128[Tensor, "H F D"]:
    """Return the rotated rows of every head as complex numbers."""
    heads = rows.unflatten(0, (n_head, -1))
    rotated = heads[:, : rope.rotated(heads.shape[1])].mT
    return torch.complex(*(part.contiguous() for part in pairs(rotated, rope.layout))).mT


def real_pairs(rows: Complex128[Tensor, "H F D"], layout: str) -> Float64[Tensor, "H E D"]:
    """Undo `complex_pairs`."""
    if layout == "half-split":
        return torch.cat([rows.real, rows.imag], dim=1)
    return torch.stack([rows.real, rows.imag], dim=2).flatten(1, 2)
