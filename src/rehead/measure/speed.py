"""How fast a model decodes."""

import time

import torch

from rehead.generation import generate
from rehead.model import LanguageModel


def decode_speed(
    model: LanguageModel, n_token: int, *, use_cache: bool, repeats: int = 3, batch_size: int = 1
) -> float:
    """Tokens per second of greedy generation of `n_token` tokens from one, the best of `repeats` runs.

    One short run goes before, uncounted. All rows of the batch count.
    """
    ids = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
    generate(model, ids, min(n_token, 8), 0, use_cache=use_cache)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        generate(model, ids, n_token, 0, use_cache=use_cache)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        best = min(best, time.perf_counter() - start)
    return n_token * batch_size / best
