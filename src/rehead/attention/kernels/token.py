"""One token over all rows of a cache: two products, without repeating keys or values."""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.definition import softmax


def attend_token(
    query: Float[Tensor, "N G E"],
    key: Float[Tensor, "N S E"],
    value: Float[Tensor, "N S V"],
    scale: float,
    bias: Float[Tensor, "N 1 S"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "N G V"]:
    """Attention of one token, N = B K. `bias` is 0, or minus infinity for hidden rows."""
    return torch.bmm(token_weights(query, key, scale, bias, softcap), value)


def token_weights(
    query: Float[Tensor, "N G E"],
    key: Float[Tensor, "N S E"],
    scale: float,
    bias: Float[Tensor, "N 1 S"] | None = None,
    softcap: float | None = None,
) -> Float[Tensor, "N G S"]:
    """Attention weights of one token."""
    if softcap is not None:
        scores = softcap * torch.tanh(torch.bmm(query, key.transpose(1, 2)) * (scale / softcap))
        scores = scores if bias is None else scores + bias
    else:
        added = query.new_empty(()) if bias is None else bias
        scores = torch.baddbmm(added, query, key.transpose(1, 2), beta=0 if bias is None else 1, alpha=scale)
    return softmax(scores)


def attend_scaled_token(
    query: Float[Tensor, "B H E"],
    rows: Float[Tensor, "B S _"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
) -> Float[Tensor, "B H R"]:
    """Attention of one token over rows of a key (its first `rank` numbers are the value) and a scale per KV head."""
    width = query.shape[2]
    keys, scales = rows[..., :width], rows[..., width:].transpose(1, 2)  # B S E, B K S
    products = torch.bmm(query, keys.transpose(1, 2)).unflatten(1, (scales.shape[1], -1))  # B K G S
    scores = (products * (scales * scale)[:, :, None]).flatten(1, 2)
    if hidden is not None:
        scores = scores + hidden
    return torch.bmm(softmax(scores), rows[..., :rank])
