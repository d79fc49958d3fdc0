"""What attention itself takes of a training step: scores, softmax and the sums of values, without projections."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rehead.attention import kernels
from rehead.attention.mask import Mask
from rehead.model import LanguageModel, modes_kept
from rehead.system.device import synchronize


@dataclass(kw_only=True)
class AttentionCost:
    """Over all layers: `seconds` of the forward and the backward pass, and `kept_bytes`, which the forward
    pass keeps for the backward pass beside the queries, keys and values themselves.
    """

    seconds: float = 0.0
    kept_bytes: int = 0


def attention_cost(
    model: LanguageModel, inputs: Tensor, *, scores_kept: bool = False, dtype: torch.dtype | None = None
) -> AttentionCost | None:
    """Of one training step on `inputs` (B, L), dropout included; None for a model without attention.

    By the kernel that training uses or, with `scores_kept`, by the definition, which writes the (L, L) scores
    of every head out as the homework's starter does: its `attention_computation_time` and
    `attention_computation_memory` are the forward part of that. Each call is taken by itself, on the arguments
    it gets in the step; `dtype` is autocast's. Neither weights nor mode change.
    """
    cost, calls = AttentionCost(), 0
    device, compute = model.device, kernels.attend

    def probe(query: Tensor, key: Tensor, value: Tensor, mask: Mask, **rules: Any) -> Tensor:
        nonlocal calls
        calls += 1
        query, key, value = given = tuple(each.detach().requires_grad_() for each in (query, key, value))

        def run() -> Tensor:
            if scores_kept:
                return kernels.reference(query, key, value, mask.dense(device), **rules)
            return compute(query, key, value, mask, **rules)

        with torch.enable_grad():
            synchronize(device)
            start = time.perf_counter()
            gathered = run()
            gathered.backward(torch.ones_like(gathered))
            synchronize(device)
            cost.seconds += time.perf_counter() - start
            with _kept(given) as kept:
                gathered = run()
        cost.kept_bytes += sum(kept.values())
        return gathered.detach()

    with modes_kept(model), torch.no_grad():
        model.train()
        kernels.attend = probe
        try:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                model(inputs.to(device))
        finally:
            kernels.attend = compute
    return cost if calls else None


@contextmanager
def _kept(given: tuple[Tensor, ...]) -> Iterator[dict[int, int]]:
    """Bytes by place of all that autograd saves meanwhile, without the storages of `given`."""
    kept: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in given}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept
