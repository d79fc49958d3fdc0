"""How fast a model decodes."""

import time

import torch
from torch import nn

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


def input_lengths(model: LanguageModel, n_token: int, *, use_cache: bool) -> list[int]:
    """Tokens that went through the model for each of `n_token` new ones after a first.

    1, 1, 1, ... with a cache and 1, 2, 3, ... without show that each way is what it is called.
    """
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    seen: list[int] = []
    hook = embedding.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].shape[1]))
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        generate(model, ids, n_token, 0, use_cache=use_cache)
    finally:
        hook.remove()
    return seen
