"""Sliding windows in prefill and training, beside SDPA with a mask and compiled FlexAttention.

In the type that the device's windows are made for: bfloat16 on a GPU, where flash attention takes it.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from harness import Arm, Case, Cases, Growth, Setting
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from rehead.attention import kernels
from rehead.attention.mask import Mask

HEADS, WIDTH, WINDOW = 8, 64, 256
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}


def cases(setting: Setting) -> Cases:
    """Forward at several lengths, forward and backward, growth."""
    for n in (1024, 4096, 8192):
        query, key, value = sample(n, setting)
        with torch.no_grad():
            yield Case(
                name=f"window {WINDOW}, N={n}, forward",
                ours=Arm(forward(ours, query, key, value)),
                peers={
                    "SDPA with a mask": Arm(forward(masked(n, setting), query, key, value)),
                    "compiled FlexAttention": flex(n, setting, query, key, value),
                },
                at_least={"SDPA with a mask": 10, "compiled FlexAttention": 1} if n == 8192 else {},
                flops=4 * HEADS * WIDTH * (WINDOW * n - WINDOW * (WINDOW - 1) / 2),
                dtype=query.dtype,
            )
    n = 4096
    leaves = sample(n, setting)
    yield Case(
        name=f"window {WINDOW}, N={n}, forward and backward",
        ours=Arm(both_ways(ours, *leaves)),
        peers={"SDPA with a mask": Arm(both_ways(masked(n, setting), *leaves))},
        at_least={"SDPA with a mask": 4},
        dtype=leaves[0].dtype,
    )
    sizes = (2048, 4096, 8192, 16384)
    for name, way in (("forward", forward), ("forward and backward", both_ways)):
        yield Growth(
            name=f"window {WINDOW}, {name}",
            sizes=sizes,
            make=lambda n, way=way: way(ours, *sample(n, setting)),
            at_most=2.15,
            dtype=DTYPE[setting.device],
        )


def sample(n: int, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one sequence."""
    device = setting.device
    query, key, value = (
        torch.randn(1, n, HEADS, WIDTH, device=device, dtype=DTYPE[device]) for _ in range(3)
    )
    return query, key, value


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a windowed layer calls."""
    n = query.shape[1]
    return kernels.attend(query, key, value, Mask(n_query=n, n_key=n, window=WINDOW))


def masked(n: int, setting: Setting) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """SDPA with the window as a matrix, made once."""
    dense = Mask(n_query=n, n_key=n, window=WINDOW).dense(setting.device)
    assert dense is not None
    mask = dense[:, None]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)

    return run


def flex(n: int, setting: Setting, *inputs: Tensor) -> Arm | str:
    """FlexAttention, its block mask made once; it needs a compiler."""

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < WINDOW)

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = create_block_mask(rule, None, None, n, n, device=setting.device)
        compiled = torch.compile(flex_attention, dynamic=False)

        def run() -> Tensor:
            heads_first = (t.transpose(1, 2) for t in inputs)
            return compiled(*heads_first, block_mask=blocks).transpose(1, 2)

        try:
            run()
        except Exception as error:
            return f"does not compile here ({type(error).__name__})"
    return Arm(run)


def forward(way: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Tensor]:
    """One pass without gradients."""

    @torch.no_grad()
    def run() -> Tensor:
        return way(*inputs)

    return run


def both_ways(way: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Gradients with respect to all inputs, from a fixed gradient of the output."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    torch.manual_seed(1)
    upstream = torch.randn_like(inputs[0])

    def run() -> Tensor:
        return torch.stack(torch.autograd.grad(way(*leaves), leaves, upstream))

    return run
