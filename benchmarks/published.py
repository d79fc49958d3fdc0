"""Published conversions of rotary heads into MLA, from their papers and code, as models of rehead's.

TransMLA (arXiv 2502.07864): one rotary part for all heads. Real rotations across KV heads, and across `fold`
neighbouring frequencies together, gather the energy of the keys in a few components (RoRoPE, FreqFold); the others lose
their rotation. Then keys and values, balanced by their norms, are one latent by PCA of what they are on a text.

MHA2MLA (arXiv 2502.14837): a rotary part per KV head, the pairs of largest norms of queries and keys; the rest and the
values are one latent by SVD of their weights.

Both are followed as published, without healing. Norms are root mean squares here.
"""

import torch
from torch import Tensor

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.conversion.base import Statistics, Weights, common, projections
from rehead.conversion.fit.moments import attentions
from rehead.conversion.layers import with_layers
from rehead.conversion.steps.deepseek import repeated
from rehead.conversion.steps.rotations import complex_pairs, real_pairs
from rehead.model import LanguageModel

RIDGE = 0.01
"""Of the mean of a covariance's diagonal, as in TransMLA's code."""


def transmla(
    model: LanguageModel, seen: list[Statistics], rope_dim: int, rank: int, fold: int
) -> LanguageModel:
    """Return the model with one rotary part of `rope_dim` for all heads, and a latent of `rank`.

    Bands of `fold` neighbouring frequencies are rotated together; each keeps fold * rope_dim / head_dim components.
    """
    layers = []
    for module, found in zip(attentions(model), seen, strict=True):
        source, weights, inputs = _parts(module, found)
        query, key, rope = _halves(source, weights)
        n_pair, step = key.shape[1], source.head_dim // rope_dim
        if fold % step or n_pair % fold:
            raise ValueError(f"fold={fold}: a multiple of {step} that divides {n_pair}")
        kept = fold // step
        rest, turned, asking = key.clone(), [], []
        pairs: list[int] = []
        own = torch.arange(source.n_query_head) // source.group
        for begin in range(0, n_pair, fold):
            band = slice(begin, begin + fold)
            z = key[:, band].flatten(0, 1)  # K M, D
            basis = _components((z @ inputs.to(z.dtype) @ z.mH).real)[:, :kept]
            of_head = basis.unflatten(0, (source.n_kv_head, fold)).to(z.dtype)
            turned.append(basis.mT.to(z.dtype) @ z)
            asking.append(torch.einsum("hmd,hmj->hjd", query[:, band], of_head[own]))
            rest[:, band] -= torch.einsum("kmj,jd->kmd", of_head, turned[-1])
            pairs += range(begin, begin + fold, step)
        config = _config(source, repeated(rope, source.head_dim, rope_dim, pairs), rope_dim, rank)
        stack, scale = _balanced(source, rest, weights, inputs, 2 * n_pair * source.n_kv_head - rope_dim)
        moment = scale[:, None] * (stack @ inputs @ stack.mT) * scale
        best = _components(moment)[:, :rank]
        factors = best / scale[:, None], best.mT @ (scale[:, None] * stack)
        layers.append(
            (config, _latent(source, config, weights, torch.cat(asking, 1), torch.cat(turned), factors))
        )
    return with_layers(model, layers)


def mha2mla(model: LanguageModel, seen: list[Statistics], rope_dim: int, rank: int) -> LanguageModel:
    """Return the model with `rope_dim` rotated numbers of every KV head, all cached, and a latent of `rank`."""
    layers = []
    for module, found in zip(attentions(model), seen, strict=True):
        source, weights, inputs = _parts(module, found)
        query, key, rope = _halves(source, weights)
        norms = [
            torch.einsum("hfd,de,hfe->hf", half, inputs.to(half.dtype), half.conj()).real.clamp(min=0).sqrt()
            for half in (query, key)
        ]
        size = norms[0].unflatten(0, (source.n_kv_head, -1)).sum(1) * norms[1]
        chosen = size.argsort(descending=True)[:, : rope_dim // 2].sort().values  # K p
        head = torch.arange(source.n_kv_head).repeat_interleave(rope_dim // 2)
        pair = chosen.flatten()
        rest = key.clone()
        rest[head, pair] = 0
        own = torch.arange(source.n_query_head) // source.group
        asking = query[:, pair] * (head == own[:, None])[:, :, None]
        width = source.n_kv_head * rope_dim
        config = _config(source, repeated(rope, source.head_dim, width, pair.tolist()), width, rank)
        stack = torch.cat([real_pairs(rest, rope.layout), _values(source, weights)], dim=1).flatten(0, 1)
        left, sizes, right = torch.linalg.svd(stack, full_matrices=False)
        factors = left[:, :rank] * sizes[:rank], right[:rank]
        layers.append((config, _latent(source, config, weights, asking, key[head, pair], factors)))
    return with_layers(model, layers)


def _parts(module: torch.nn.Module, found: Statistics) -> tuple[GroupedConfig, Weights, Tensor]:
    source = module.config
    assert isinstance(source, GroupedConfig)
    weights = {name: weight.detach().double() for name, weight in module.named_parameters()}
    inputs = found.in_memory().inputs
    assert inputs is not None
    return source, weights, inputs[:-1, :-1]


def _halves(source: GroupedConfig, weights: Weights) -> tuple[Tensor, Tensor, RopeConfig]:
    """Return queries and keys as complex numbers, (H, F, D) and (K, F, D)."""
    assert source.rope is not None
    query = complex_pairs(weights["q_proj.weight"], source.n_query_head, source.rope)
    return query, complex_pairs(weights["k_proj.weight"], source.n_kv_head, source.rope), source.rope


def _values(source: GroupedConfig, weights: Weights) -> Tensor:
    return weights["v_proj.weight"].unflatten(0, (source.n_kv_head, -1))


def _components(moment: Tensor) -> Tensor:
    """Return the eigenvectors, (N, N), the largest first."""
    ridge = RIDGE * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)
    return torch.linalg.eigh(moment + ridge)[1].flip(-1)


def _balanced(
    source: GroupedConfig, rest: Tensor, weights: Weights, inputs: Tensor, unrotated: int
) -> tuple[Tensor, Tensor]:
    """Return keys and values, stacked by KV head, and what each row is multiplied by: keys become as large as values.

    `unrotated` numbers of all keys count; the others are 0, in some basis.
    """
    assert source.rope is not None
    parts = real_pairs(rest, source.rope.layout), _values(source, weights)
    keys, values = (torch.einsum("kvd,de,kve->kv", part, inputs, part) for part in parts)
    alpha = float(values.mean() / (keys.sum() / unrotated)) ** 0.5 if unrotated else 1.0
    scale = torch.full_like(keys, alpha), torch.ones_like(values)
    return torch.cat(parts, dim=1).flatten(0, 1), torch.cat(scale, dim=1).flatten()


def _config(source: GroupedConfig, rope: RopeConfig, width: int, rank: int) -> LatentConfig:
    return LatentConfig(
        **common(source) | {"rope": rope},
        n_kv_head=source.n_kv_head,
        kv_lora_rank=rank,
        qk_nope_head_dim=source.head_dim,
        qk_rope_head_dim=width,
        latent_norm=False,
    )


def _latent(
    source: GroupedConfig,
    config: LatentConfig,
    weights: Weights,
    asking: Tensor,
    turned: Tensor,
    factors: tuple[Tensor, Tensor],
) -> Weights:
    """Return the weights of an MLA: rotated queries (H, P/2, D) and keys (P/2, D), and the latent's two factors."""
    assert source.rope is not None
    still = weights["q_proj.weight"].unflatten(0, (source.n_query_head, -1))
    queries = torch.cat([still, real_pairs(asking, source.rope.layout)], dim=1)
    width = source.head_dim + config.qk_rope_head_dim
    up, down = factors
    return projections(weights, "o_proj") | {
        "q_proj.weight": (queries * source.relative_scale * (width / source.head_dim) ** 0.5).flatten(0, 1),
        "kv_a_proj_with_mqa.weight": torch.cat([down, real_pairs(turned[None], source.rope.layout)[0]]),
        "kv_b_proj.weight": up,
    }
