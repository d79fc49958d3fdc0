"""Who attends to whom in a model, and how widely each head looks (seeds C1, C2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention import Attention
from rehead.attention.mask import Mask
from rehead.errors import NumericError, UsageError
from rehead.model import GPT, LanguageModel, evaluating


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How widely the heads of a layer look, each figure a mean over the queries.

    `entropy` of the weights in nats: 0 where all weight lies on one key. `distance` in tokens between a
    query and the keys it weighs. `even` holds both for a head that weighs all it may see alike.
    """

    entropy: list[float]
    distance: list[float]
    even: tuple[float, float]


@torch.no_grad()
def attention_maps(model: LanguageModel, ids: Int[Tensor, " L"]) -> list[Float[Tensor, "_ L L"]]:
    """The attention weights of each layer, (H, L, L): row i is what token i takes from each token.

    By the reference kernel, in eval mode, without cache. Raises UsageError for a model that has no
    attention, NumericError where a weight is not finite.
    """
    if not isinstance(model, GPT):
        raise UsageError(
            f"a model of type {model.config.model_type} has no attention: each token reads one state, whatever "
            "the past. Inspect a model of type gpt."
        )
    maps: list[Tensor] = []

    def keep(module: Attention, given: tuple[Tensor, ...], named: dict[str, object]) -> None:
        maps.append(module.weights(*given)[0].float().cpu())

    hooks = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True)  # type: ignore[union-attr]
        for layer in model.layers
    ]
    try:
        with evaluating(model):
            model.hidden(ids[None].to(model.device))
    finally:
        for hook in hooks:
            hook.remove()
    for index, weights in enumerate(maps):
        if not weights.isfinite().all():
            raise NumericError(f"layer {index}: attention weights are not finite, the model is damaged.")
    return maps


def spread(weights: Float[Tensor, "H L L"], window: int | None = None) -> Spread:
    """Entropy and distance of each head's weights, and what even weights over the visible keys give."""
    n_token = weights.shape[-1]
    seen = Mask(n_query=n_token, n_key=n_token, window=window).dense()
    even = torch.ones(1, 1, 1) if seen is None else seen.float()
    entropy, distance = _spread(weights)
    (even_entropy,), (even_distance,) = _spread(even / even.sum(-1, keepdim=True))
    return Spread(entropy=entropy, distance=distance, even=(even_entropy, even_distance))


def prefix_change(
    first: list[Float[Tensor, "_ L L"]], second: list[Float[Tensor, "_ S S"]], n_token: int
) -> list[float]:
    """Per layer, by how much the rows of the first `n_token` tokens differ, which both texts share.

    A causal model gives 0 up to rounding: a token never sees what comes after it, and counts its position
    from the start. What a row gives to tokens beyond the shared ones counts as a difference.
    """
    changes = []
    for one, other in zip(first, second, strict=True):
        here, there = one[:, :n_token], other[:, :n_token]
        beyond = [rows[..., n_token:].flatten() for rows in (here, there)]
        shared = (here[..., :n_token] - there[..., :n_token]).abs().flatten()
        changes.append(float(torch.cat([shared, *beyond]).max()))
    return changes


def _spread(weights: Float[Tensor, "H L L"]) -> tuple[list[float], list[float]]:
    place = torch.arange(weights.shape[-1])
    away = (place[:, None] - place).abs()
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    distance = (weights * away).sum(-1).mean(-1)
    return entropy.tolist(), distance.tolist()
