"""What this machine can do at most: bytes read and numbers multiplied per second (Williams et al., 2009)."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rehead.system.device import synchronize

SAMPLE = 0.02
"""Seconds one measurement takes at least."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Of the square matrices that are multiplied."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Bytes read per second, and FLOPs per second of matrix products."""

    read: float
    matmul: float

    def seconds(self, n_bytes: int | float, n_flop: int | float) -> float:
        """The least time for work that reads and computes so much, both at once."""
        return max(n_bytes / self.read, n_flop / self.matmul)


def read_rate(n_bytes: int, device: torch.device) -> float:
    """Bytes per second of reading a block of `n_bytes` over and over, all threads at once.

    A block that fits into the processor's caches is read from there, as weights that fit are.
    """
    block = torch.ones(max(n_bytes // 4, 1), device=device, dtype=torch.float32)
    return block.nbytes * _rate(block.sum, device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs per second of a product of two square matrices of `dtype`."""
    side = SIDE.get(device.type, 2048)
    matrix = torch.full((side, side), 1 / side, device=device, dtype=dtype)
    return 2 * side**3 * _rate(lambda: matrix @ matrix, device)


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """Calls per second, after one uncounted call, over `SAMPLE` seconds or more."""
    work()
    synchronize(device)
    n_call, seconds = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(n_call):
            work()
        synchronize(device)
        seconds = time.perf_counter() - start
        if seconds >= SAMPLE:
            return n_call / seconds
        n_call *= 2
