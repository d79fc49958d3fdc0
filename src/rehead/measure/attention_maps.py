"""Attention maps of a model, and the entropy and distance of each head."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.attention import Attention
from rehead.attention.mask import Mask
from rehead.errors import NumericError, UsageError
from rehead.model import GPT, LanguageModel, evaluating


@dataclass(frozen=True, kw_only=True)
class HeadSpread:
    """How widely the heads of a layer attend, each figure a mean over the queries.

    `entropy` of the weights in nats: 0 if all weight is on one key. `distance` in tokens between a query and
    its keys, weighted. `even` has both for a head with equal weights on all visible keys.
    """

    entropy: list[float]
    distance: list[float]
    even: tuple[float, float]


@torch.no_grad()
def attention_maps(model: LanguageModel, ids: Int[Tensor, " L"]) -> list[Float[Tensor, "_ L L"]]:
    """Return the attention weights of each layer, (H, L, L): row i has the weights of token i over all tokens.

    Computed by the reference kernel, in eval mode, without a cache. Raises UsageError for a model without
    attention, NumericError for a weight that is not finite.
    """
    if not isinstance(model, GPT):
        raise UsageError(
            f"a model of type {model.config.model_type} has no attention: each token reads one state of constant "
            "size. Inspect a model of type gpt."
        )
    maps: list[Tensor] = []

    def record(module: Attention, arguments: tuple[Tensor, ...], named: dict[str, object]) -> None:
        maps.append(module.weights(*arguments)[0].float().cpu())

    with evaluating(model), ExitStack() as hooks:
        for layer in model.layers:
            hook = layer.self_attn.register_forward_pre_hook(record, with_kwargs=True)  # type: ignore[union-attr]
            hooks.enter_context(hook)
        model.hidden(ids[None].to(model.device))
    for index, weights in enumerate(maps):
        if not weights.isfinite().all():
            raise NumericError(
                f"layer {index}: attention weights are not finite: the model is damaged. Use another."
            )
    return maps


def head_spread(weights: Float[Tensor, "H L L"], window: int | None = None) -> HeadSpread:
    """Return entropy and distance of each head's weights, and those of equal weights on all visible keys."""
    n_token = weights.shape[-1]
    seen = Mask(n_query=n_token, n_key=n_token, window=window).dense()
    even = torch.ones(1, 1, 1) if seen is None else seen.float()
    entropy, distance = _entropy_and_distance(weights)
    (even_entropy,), (even_distance,) = _entropy_and_distance(even / even.sum(-1, keepdim=True))
    return HeadSpread(entropy=entropy, distance=distance, even=(even_entropy, even_distance))


def prefix_change(
    first: list[Float[Tensor, "_ L L"]], second: list[Float[Tensor, "_ S S"]], n_token: int
) -> list[float]:
    """Return the largest difference per layer in the rows of the first `n_token` tokens, which both texts share.

    A causal model gives 0 up to rounding: a token never sees later tokens, and positions count from the
    start. Weight on tokens beyond the shared ones counts as a difference.
    """
    changes = []
    for weights in zip(first, second, strict=True):
        ours, theirs = (layer[:, :n_token] for layer in weights)
        beyond = [rows[..., n_token:].flatten() for rows in (ours, theirs)]
        shared = (ours[..., :n_token] - theirs[..., :n_token]).abs().flatten()
        changes.append(float(torch.cat([shared, *beyond]).max()))
    return changes


def _entropy_and_distance(weights: Float[Tensor, "H L L"]) -> tuple[list[float], list[float]]:
    position = torch.arange(weights.shape[-1])
    away = (position[:, None] - position).abs()
    entropy = torch.special.entr(weights).sum(-1).mean(-1)
    distance = (weights * away).sum(-1).mean(-1)
    return entropy.tolist(), distance.tolist()
