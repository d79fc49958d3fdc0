"""Measures how fast a model decodes."""

import time

import torch
from torch import nn

from rehead.generation import generate
from rehead.model import LanguageModel
from rehead.system.device import synchronize


def decode_speed(model: LanguageModel, n_token: int, *, use_cache: bool) -> float:
    """Return tokens per second of greedy generation of `n_token` tokens after one. A short run goes first, untimed."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    generate(model, ids, min(n_token, 8), 0, use_cache=use_cache)
    start = time.perf_counter()
    generate(model, ids, n_token, 0, use_cache=use_cache)
    synchronize(model.device)
    return n_token / (time.perf_counter() - start)


def input_lengths(model: LanguageModel, n_token: int, *, use_cache: bool) -> list[int]:
    """Return how many tokens went through the model for each of `n_token` new tokens after one.

    With a cache these are 1, 1, 1, ..., without 1, 2, 3, ...
    """
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    seen: list[int] = []
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with embedding.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].shape[1])):
        generate(model, ids, n_token, 0, use_cache=use_cache)
    return seen
