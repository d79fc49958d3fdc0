"""This machine's roofline: peak bytes read and FLOPs per second (Williams et al., 2009)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rehead.nn.linear import Linear
from rehead.system.device import synchronize
from rehead.system.huge_pages import HugePages

SAMPLE = 0.02
"""Minimum seconds of one measurement."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows of the square matrices that are multiplied."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bytes read per second, and FLOPs per second of matrix products."""

    read: float
    matmul: float

    def seconds(self, n_bytes: int | float, n_flop: int | float) -> float:
        """Return the least time to read `n_bytes` and compute `n_flop`, with both overlapping."""
        return max(n_bytes / self.read, n_flop / self.matmul)


def read_rate(n_bytes: int, device: torch.device) -> float:
    """Return bytes per second when all threads read a block of `n_bytes` repeatedly.

    A block that fits the processor's caches is read from there, just like weights that fit.
    """
    block = torch.ones(1, device=device, dtype=torch.float32).expand(max(n_bytes // 4, 1))
    if device.type == "cpu":
        block = HugePages().keep(block)  # as the weights of a loaded model
    block = block.contiguous()
    return block.nbytes * _rate(block.sum, device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return FLOPs per second of a product of two square matrices of `dtype`."""
    side = SIDE.get(device.type, 2048)
    matrix = torch.full((side, side), 1 / side, device=device, dtype=dtype)
    layer = Linear(side, side, bias=False, device=device, dtype=dtype)
    with torch.no_grad():
        return 2 * side**3 * _rate(lambda: layer(matrix), device)


def _rate(run: Callable[[], object], device: torch.device) -> float:
    """Return calls per second, after one untimed call, over `SAMPLE` seconds or more."""
    run()
    synchronize(device)
    n_call, seconds = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(n_call):
            run()
        synchronize(device)
        seconds = time.perf_counter() - start
        if seconds >= SAMPLE:
            return n_call / seconds
        n_call *= 2
