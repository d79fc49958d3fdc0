"""Sliding windows with PyTorch's flash attention for GPUs, in float16 and bfloat16; without dropout.

The kernel skips keys outside the window. It is used only after a self-check against SDPA in float64, on the same
device and for the same dtype and heads; otherwise windows are computed in chunks. Tests run it on a CPU with an
emulation of the documented behaviour. It has not run on a GPU yet, and its speed is unknown.
"""

from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.kernels.sdpa import SDPA, of_one_width
from rehead.attention.kernels.selfcheck import BUDGET, passes, relative_error, seeded_normal
from rehead.attention.kernels.windowed import window_limit
from rehead.attention.mask import Mask
from rehead.native import switch

DEVICE = "cuda"
"""The device type of the kernel."""
DTYPES = (torch.float16, torch.bfloat16)
MOST_WIDTH = 256
"""Maximum width of a head; all heads are padded to a multiple of `UNIT`."""
UNIT = 8
CHECKED_SIZES = ((2, 70, 70, 16), (1, 130, 300, 100), (2, 33, 200, 3))
"""Sequences, queries, keys and window of the self-check; a window of 1 has no gradients to compare."""


class Flash(Kernel):
    """`torch.nn.attention.varlen.varlen_attn`, which skips keys outside the window."""

    name = "flash"
    words = "windowed flash attention"

    def limit(self, call: Call) -> str | None:
        """Refuse unsupported calls, and compiled graphs, which would trace the self-check."""
        query, value = call.query, call.value
        if (no_window := window_limit(call)) is not None:
            return no_window
        if query.device.type != DEVICE:
            return "not on a GPU"
        if (refusal := switch.gpu_refusal()) is not None:
            return refusal
        if query.dtype not in DTYPES or query.dtype != value.dtype:
            return "not in float16 or bfloat16"
        if torch.compiler.is_compiling():
            return "a compiled graph"
        (n_head, width), (n_kv_head, n_value) = query.shape[2:], value.shape[2:]
        if max(width, n_value) > MOST_WIDTH:
            return "heads are too wide"
        agrees_here = trusted(query.device, query.dtype, n_head, n_kv_head, width, n_value)
        return None if agrees_here else "it does not agree with the definition on this device"

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call. The kernel's window is the number of keys before and after the query's own position."""
        from torch.nn.attention.varlen import varlen_attn

        window, device = call.mask.window, call.query.device
        assert window is not None
        (n_batch, n_query, n_head, _), (n_key, n_kv_head, n_value) = call.query.shape, call.value.shape[1:]
        padded = of_one_width(call.query, call.key, call.value, multiple_of=UNIT)
        query, key, value = (t.flatten(0, 1) for t in padded)  # all sequences concatenated
        text = torch.arange(n_batch + 1, dtype=torch.int32, device=device)
        gathered = varlen_attn(
            query, key, value, text * n_query, text * n_key, n_query, n_key,
            scale=call.scale, window_size=(window - 1, 0), enable_gqa=n_head != n_kv_head,
        )  # fmt: skip
        assert isinstance(gathered, Tensor)
        return gathered.unflatten(0, (n_batch, n_query))[..., :n_value]


@cache
def trusted(
    device: torch.device, dtype: torch.dtype, n_head: int, n_kv_head: int, width: int, n_value: int
) -> bool:
    """Whether the kernel and its gradients agree with SDPA in float64 on random inputs on this device; cached."""
    query, key, value = (n_head, width), (n_kv_head, width), (n_kv_head, n_value)

    def error() -> float:
        return max(_error(device, dtype, query, key, value, sizes) for sizes in CHECKED_SIZES)

    return passes(
        error, BUDGET[dtype], f"flash attention is not used for windows on {device}, chunks are computed"
    )


def _error(
    device: torch.device,
    dtype: torch.dtype,
    query: tuple[int, int],
    key: tuple[int, int],
    value: tuple[int, int],
    sizes: tuple[int, int, int, int],
) -> float:
    """Largest relative error of one call and its gradients."""
    n_batch, n_query, n_key, window = sizes
    mask, draw = Mask(n_query=n_query, n_key=n_key, window=window), seeded_normal(n_key, device, dtype)
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [draw(n_batch, n, *heads) for n, heads in ((n_query, query), (n_key, key), (n_key, value))]
        upstream = draw(n_batch, n_query, query[0], value[1])
        results = []
        for kernel, exact in ((Flash(), dtype), (SDPA(), torch.float64)):
            leaves = [t.detach().to(exact).requires_grad_() for t in inputs]
            out = kernel.run(Call(leaves[0], leaves[1], leaves[2], mask, float(query[1] ** -0.5)))
            results.append([out.detach(), *torch.autograd.grad(out, leaves, upstream.to(exact))])
    return max(relative_error(got, wanted) for got, wanted in zip(*results, strict=True))
