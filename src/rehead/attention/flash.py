"""Sliding windows by the flash attention that PyTorch brings for GPUs, in float16 and bfloat16; without dropout.

It skips what lies outside a window. Used once it has agreed with the definition on that device, for that type and those
heads; otherwise windows are computed in chunks. Tested against what its documentation says, by an emulation on a CPU;
it has not been run on a GPU, nor is its speed known.
"""

from functools import cache

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.attention.fused import sdpa
from rehead.attention.mask import Mask
from rehead.attention.trust import BUDGET, agrees, numbers, off

DEVICE = "cuda"
"""The kind of device that has the kernel."""
DTYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
"""Of a head; all are filled up to a multiple of `UNIT`."""
UNIT = 8
TRIED = ((2, 70, 70, 16), (1, 130, 300, 100), (2, 33, 200, 3))
"""Sequences, queries, keys and window that it is tried on; a window of 1 has no gradients to compare."""


def refuses(
    query: Float[Tensor, "B L H E"], key: Float[Tensor, "B S K E"], value: Float[Tensor, "B S K V"]
) -> str | None:
    """Why `windowed` here is not for these; None where it is, and trusted.

    Not in a compiled graph, which would look into the trial.
    """
    if query.device.type != DEVICE:
        return "not on a GPU"
    if query.dtype not in DTYPES or query.dtype != value.dtype:
        return "not in float16 or bfloat16"
    if torch.compiler.is_compiling():
        return "a compiled graph"
    (n_head, width), (n_kv_head, n_value) = query.shape[2:], value.shape[2:]
    if max(width, n_value) > MOST_WIDTH:
        return "heads are too wide"
    agrees_here = trusted(query.device, query.dtype, n_head, n_kv_head, width, n_value)
    return None if agrees_here else "it does not agree with the definition on this device"


def windowed(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> Float[Tensor, "B L H V"]:
    """`fused.windowed`: queries at the last L of S places, each sees the last keys up to its own.

    The kernel's window is how many keys before its own place a query sees, and how many after.
    """
    from torch.nn.attention.varlen import varlen_attn

    assert mask.window is not None
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    (n_batch, n_query, n_head, _), (n_key, n_kv_head, n_value) = query.shape, value.shape[1:]
    width = -(-max(query.shape[-1], n_value) // UNIT) * UNIT
    query, key, value = (
        (t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))).flatten(0, 1)
        for t in (query, key, value)
    )  # texts one after another
    text = torch.arange(n_batch + 1, dtype=torch.int32, device=query.device)
    gathered = varlen_attn(
        query, key, value, text * n_query, text * n_key, n_query, n_key,
        scale=scale, window_size=(mask.window - 1, 0), enable_gqa=n_head != n_kv_head,
    )  # fmt: skip
    assert isinstance(gathered, Tensor)
    return gathered.unflatten(0, (n_batch, n_query))[..., :n_value]


@cache
def trusted(
    device: torch.device, dtype: torch.dtype, n_head: int, n_kv_head: int, width: int, n_value: int
) -> bool:
    """Whether it agrees with the definition in float64 on random numbers there, gradients too; found out once."""
    query, key, value = (n_head, width), (n_kv_head, width), (n_kv_head, n_value)

    def far() -> float:
        return max(_off(device, dtype, query, key, value, sizes) for sizes in TRIED)

    return agrees(
        far, BUDGET[dtype], f"flash attention is not used for windows on {device}, chunks are computed"
    )


def _off(
    device: torch.device,
    dtype: torch.dtype,
    query: tuple[int, int],
    key: tuple[int, int],
    value: tuple[int, int],
    sizes: tuple[int, int, int, int],
) -> float:
    """The largest error of one call and of its gradients, each of the largest number it should give."""
    n_batch, n_query, n_key, window = sizes
    mask, draw = Mask(n_query=n_query, n_key=n_key, window=window), numbers(n_key, device, dtype)
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [draw(n_batch, n, *heads) for n, heads in ((n_query, query), (n_key, key), (n_key, value))]
        upstream = draw(n_batch, n_query, query[0], value[1])
        results = []
        for way, exact in ((windowed, dtype), (sdpa, torch.float64)):
            leaves = [t.detach().to(exact).requires_grad_() for t in inputs]
            out = way(leaves[0], leaves[1], leaves[2], mask)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(exact))])
    return max(off(got, wanted) for got, wanted in zip(*results, strict=True))
