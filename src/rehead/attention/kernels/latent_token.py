"""One token over a cache of latents: MQA whose key is a row and whose value is the row's first R columns.

`latent_token_reference` is the definition. On a GPU, without gradients, `attend_latent_triton` reads the rows once
instead of several times. It is used if Triton is installed, after a self-check against the definition on that device,
for that dtype and those sizes.
"""

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.selfcheck import BUDGET, passes, relative_error, seeded_normal
from rehead.attention.kernels.token import token_weights
from rehead.native import switch

TRITON_ON = "cuda"
"""The device type of the kernel."""
CHECKED_SIZES = ((1, 1), (2, 65), (3, 1100))
"""Sequences and rows of the self-check: one row, more than a tile, several parts."""


def latent_token_reference(
    query: Float[Tensor, "B H RP"],
    rows: Float[Tensor, "B S RP"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
) -> Float[Tensor, "B H R"]:
    """Attention over `rows`, with their first `rank` columns as values. `hidden` is minus infinity for hidden rows."""
    return torch.bmm(token_weights(query, rows, scale, hidden), rows.narrow(2, 0, rank))


def attend_latent_token(
    query: Float[Tensor, "B H RP"],
    rows: Float[Tensor, "B S RP"],
    rank: int,
    scale: float,
    hidden: Float[Tensor, "B 1 S"] | None = None,
) -> Float[Tensor, "B H R"]:
    """Compute `latent_token_reference` with the fastest kernel that passed its self-check."""
    compute: Callable[..., Tensor] = latent_token_reference
    on_gpu = query.device.type == TRITON_ON and switch.gpu_refusal() is None
    if on_gpu and query.dtype in BUDGET and not torch.is_grad_enabled():
        _, n_head, width = query.shape
        compute = trusted(query.device, query.dtype, n_head, width, rank, hidden is not None)
    return compute(query, rows, rank, scale, hidden)


@cache
def trusted(
    device: torch.device, dtype: torch.dtype, n_head: int, width: int, rank: int, hides: bool
) -> Callable[..., Tensor]:
    """Return the Triton kernel if it agrees with the definition in float64 on random inputs, else the definition.

    Cached; the first call compiles the kernel, which takes some seconds.
    """
    try:
        from rehead.attention.kernels.latent_triton import attend_latent_triton
    except ImportError:
        return latent_token_reference

    def error() -> float:
        return max(
            _error(attend_latent_triton, device, dtype, (n, n_row, n_head, width), rank, hides)
            for n, n_row in CHECKED_SIZES
        )

    fallback = f"the Triton kernel for MLA is not used on {device}, PyTorch decodes"
    return attend_latent_triton if passes(error, BUDGET[dtype], fallback) else latent_token_reference


def _error(
    compute: Callable[..., Tensor],
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    rank: int,
    hides: bool,
) -> float:
    """Relative error of one call."""
    n_batch, n_row, n_head, width = sizes
    draw = seeded_normal(n_row, device, dtype)
    query, rows, hidden = draw(n_batch, n_head, width), draw(n_batch, n_row, width), None
    if hides:
        n_seen = torch.linspace(1, n_row, n_batch, device="cpu").long()
        unseen = (torch.arange(n_row, device="cpu") >= n_seen[:, None]).to(device)
        hidden = rows.new_zeros(n_batch, 1, n_row).masked_fill_(unseen[:, None], float("-inf"))
        rows = rows.masked_fill(unseen[..., None], 100.0)
    scale = width**-0.5
    wanted = latent_token_reference(
        query.double(), rows.double(), rank, scale, None if hidden is None else hidden.double()
    )
    return relative_error(compute(query, rows, rank, scale, hidden), wanted)
