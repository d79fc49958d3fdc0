"""One token over a cache of latents: MQA whose one key is a row, and whose value is the row's first R columns.

`plain` is the definition. On a GPU, without gradients, `split` reads the rows once instead of several times: where
Triton is installed, and once it has agreed with the definition on that device, for that type and those sizes.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.step import weigh_one
from rehead.attention.trust import BUDGET, agrees, numbers, off

SPLIT_ON = "cuda"
"""The kind of device that has the kernel."""
TRIED = ((1, 1), (2, 65), (3, 1100))
"""Sequences and rows that it is tried on: one row, more than a tile, several parts."""


def plain(
    query: Float[Tensor, "B H RP"],
    rows: Float[Tensor, "B S RP"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
) -> Float[Tensor, "B H R"]:
    """What each query gathers of the first `rank` columns; `hidden` is 0, or minus infinity where it may not look."""
    return torch.bmm(weigh_one(query, rows, scale, hidden), rows.narrow(2, 0, rank))


def gather_one(
    query: Float[Tensor, "B H RP"],
    rows: Float[Tensor, "B S RP"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
) -> Float[Tensor, "B H R"]:
    """`plain`, by the fastest way that has been seen to agree with it."""
    way = plain
    if query.device.type == SPLIT_ON and query.dtype in BUDGET and not torch.is_grad_enabled():
        _, n_head, width = query.shape
        way = trusted(query.device, query.dtype, n_head, width, rank, hidden is not None)
    return way(query, rows, rank, scale, hidden)


@cache
def trusted(
    device: torch.device, dtype: torch.dtype, n_head: int, width: int, rank: int, hides: bool
) -> Callable[..., Tensor]:
    """`split.split` if it agrees with `plain` in float64 on random numbers there, else `plain`; found out once.

    Takes the seconds that compiling takes. Of two ways that both agree, neither has been measured.
    """
    try:
        from rehead.attention.split import split
    except ImportError:
        return plain

    def far() -> float:
        return max(_off(split, device, dtype, (n, n_row, n_head, width), rank, hides) for n, n_row in TRIED)

    otherwise = f"the Triton kernel for MLA is not used on {device}, PyTorch decodes"
    return split if agrees(far, BUDGET[dtype], otherwise) else plain


def _off(
    way: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    rank: int,
    hides: bool,
) -> float:
    """The largest error of one call, of the largest number it should give."""
    n_batch, n_row, n_head, width = sizes
    draw = numbers(n_row, device, dtype)
    query, rows, hidden = draw(n_batch, n_head, width), draw(n_batch, n_row, width), None
    if hides:
        n_seen = torch.linspace(1, n_row, n_batch, device="cpu").long()
        unseen = (torch.arange(n_row, device="cpu") >= n_seen[:, None]).to(device)
        hidden = rows.new_zeros(n_batch, 1, n_row).masked_fill_(unseen[:, None], float("-inf"))
        rows = rows.masked_fill(unseen[..., None], 100.0)
    scale = width**-0.5
    wanted = plain(query.double(), rows.double(), rank, scale, None if hidden is None else hidden.double())
    return off(way(query, rows, rank, scale, hidden), wanted)
