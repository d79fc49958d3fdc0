"""How much it matters that scores turn with the distance of their tokens, for every pair of rotated numbers.

As complex numbers, pair f of a query and of a key adds Re(conj(q) k e^(i t (n - m))) to the score of tokens m
and n, t the angle per position. A pair that is no longer rotated adds Re(conj(q) c k) instead, with a constant c,
and one that turns by the angle u of a pair near it Re(conj(q) c k e^(i u (n - m))), with another.

The cost of errors e in a query's scores is weighted by p Var(d), where p are the query's attention weights and d the
products of the values with the loss's gradient. The loss changes by the covariance of e and d, whose square is at
most E[e^2] Var(d) by Cauchy-Schwarz, with all moments under p. The squared gradient itself, p^2 (d - E[d])^2, ignores
tokens that are hardly read, but a large error can make the model read exactly these.
"""

from math import ceil

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from rehead.attention import GroupedAttention, kernels
from rehead.attention.mask import visible
from rehead.attention.rope import Layout

TOKENS = 8192
"""Tokens read, in windows spread evenly over the texts, at least one of each: all pairs of a window's tokens count."""
REACH = 4
"""A pair may turn by the angle of another that is at most this many pairs faster or slower."""
WEIGHTS = 2**22
"""Attention weights of one KV head that are held at once, at most: those of a few queries, where a text is long."""


class Turns:
    """Sums, over pairs of tokens of a text, w |q|^2 |k|^2 (1, cos t (n - m), sin t (n - m)) per head and pair.

    t are the `angles` of the pair. w is the `sensitivity` of the loss to the score. The heads are the query heads, in
    contiguous order; k is the key of a head's KV head. The text has `n_token` tokens.
    """

    def __init__(self, n_token: int, least: int = 0) -> None:
        """At least `least` tokens are read: a window of each of several texts."""
        self.share = min(1.0, max(TOKENS, least) / n_token)
        self.total: Tensor | None = None
        self.window = self.count = 0

    def add(
        self, attention: GroupedAttention, inputs: Float[Tensor, "B L D"], pull: Float[Tensor, "B L HV"]
    ) -> None:
        """Add texts: what the attention reads, and the loss's gradient with respect to what `o_proj` reads."""
        for x, gradient in zip(inputs.split(1), pull.split(1), strict=True):
            if ceil((self.window + 1) * self.share) > ceil(self.window * self.share):
                found = _of_text(attention, x, gradient)
                self.total = found if self.total is None else self.total + found
                self.count += x.shape[1]
            self.window += 1

    def mean(self) -> Float64[Tensor, "S H F"] | None:
        """Return the sums per token, None if nothing was added."""
        return None if self.total is None else self.total / self.count


@torch.no_grad()
def _of_text(attention: GroupedAttention, x: Tensor, gradient: Tensor) -> Tensor:
    config, rotary = attention.config, attention.rotary
    assert rotary is not None
    assert attention.v_proj is not None
    group, layout = config.group, rotary.config.layout
    query = rotary(attention.to_slots(attention._heads(attention.q_proj(x), attention.q_norm)))
    key = rotary(attention._heads(attention.k_proj(x), attention.k_norm))
    value = attention.v_proj(x).unflatten(2, (config.n_kv_head, -1))
    pulled = attention.to_slots(gradient.unflatten(2, (config.n_query_head, -1)))
    exact = torch.promote_types(
        x.dtype, torch.float32
    )  # bfloat16 cannot tell the cosine of a slow pair from 1
    query, key, value, pulled = (part.to(exact) for part in (query, key, value, pulled))
    place = torch.arange(x.shape[1], device=x.device)
    seen = visible(place[None], place[None], config.window)
    angle = place[:, None, None] * angles(rotary.config.frequencies(config.head_dim).to(x.device))
    cos, sin = angle.cos().to(key.dtype), angle.sin().to(key.dtype)  # L T F
    found = []
    for head in range(config.n_kv_head):
        of, sums = slice(head * group, (head + 1) * group), list[Tensor]()
        held = energy(key[0, :, head], layout, rotary.width)
        for rows in place.split(max(1, WEIGHTS // (group * len(place)))):
            asking = query[:, rows, of]
            read = kernels.weights(asking, key[:, :, head, None], seen[:, rows], scale=config.scale)[0, 0]
            slope = torch.einsum("lgv,sv->gls", pulled[0, rows, of], value[0, :, head])
            matters, asked = sensitivity(read, slope), energy(asking[0], layout, rotary.width)
            whole = torch.einsum("gls,sf->lgf", matters, held)[:, :, None]
            even, odd = (torch.einsum("gls,stf->lgtf", matters, held[:, None] * part) for part in (cos, sin))
            mine, other, asked = cos[rows, None], sin[rows, None], asked[:, :, None]
            parts = asked * whole, asked * (mine * even + other * odd), asked * (mine * odd - other * even)
            sums.append(torch.cat([part.double().sum(0) for part in parts], dim=1))
        found.append(torch.stack(sums).sum(0))
    return torch.cat(found).transpose(0, 1).cpu()


def angles(own: Float[Tensor, " F"]) -> Float[Tensor, "T F"]:
    """Return angles per position: each pair's own, then what it has over the pairs near it, the fastest first.

    There are 2 `REACH` of these. Where there is no such pair, the angle is the pair's own.
    """
    spread = torch.cat([own.new_zeros(REACH), own, own.new_zeros(REACH)]).unfold(0, len(own), 1)
    return torch.stack([own, *(own - other for step, other in enumerate(spread) if step != REACH)])


def sensitivity(read: Float[Tensor, "*L S"], along: Float[Tensor, "*L S"]) -> Float[Tensor, "*L S"]:
    """Return p Var(d) of every score, from attention weights p (`read`) and products d (`along`)."""
    around = along - (read * along).sum(-1, keepdim=True)
    return read * (read * around.square()).sum(-1, keepdim=True)


def energy(heads: Float[Tensor, "*N E"], layout: Layout, rotated: int) -> Float[Tensor, "*N F"]:
    """Return the squared length of every pair that rotates."""
    first, second = pairs(heads[..., :rotated], layout)
    return first.square() + second.square()


def pairs(rotated: Float[Tensor, "*N E"], layout: Layout) -> tuple[Tensor, Tensor]:
    """Return the first and the second numbers of all pairs."""
    if layout == "half-split":
        first, second = rotated.chunk(2, dim=-1)
        return first, second
    return rotated[..., 0::2], rotated[..., 1::2]
