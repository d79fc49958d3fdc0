"""The cost of attention alone in a training step: scores, softmax and sums of values, without projections."""

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
    """Sums over all layers: `seconds` of the forward and backward pass, and `kept_bytes`, which the forward
    pass saves for the backward pass besides the queries, keys and values. Copies of these count.
    """

    seconds: float = 0.0
    kept_bytes: int = 0


def attention_cost(
    model: LanguageModel,
    inputs: Tensor,
    *,
    scores_kept: bool = False,
    dtype: torch.dtype | None = None,
    dropout: bool = True,
    recompute: bool = False,
) -> AttentionCost | None:
    """Measure one training step on `inputs` (B, L); None for a model without attention.

    Without `dropout` nothing is dropped, as in steps after a teacher. With `recompute` each layer is computed twice,
    and one at a time keeps what its backward pass needs: `kept_bytes` is the largest of theirs.

    Uses the kernel of training or, with `scores_kept`, the definition, which stores the (L, L) scores of every
    head. So does the starter code of CMU 10-423's homework: its `attention_computation_time` and
    `attention_computation_memory` measure the forward part. Each call is timed on its own, with the arguments it
    has in the step; `dtype` is autocast's. Weights and mode stay as they are.
    """
    cost, calls = AttentionCost(), 0
    device, compute = model.device, kernels.attend

    def probe(query: Tensor, key: Tensor, value: Tensor, mask: Mask, **rules: Any) -> Tensor:
        nonlocal calls
        calls += 1
        query, key, value = leaves = tuple(each.detach().requires_grad_() for each in (query, key, value))

        def run() -> Tensor:
            if scores_kept:
                return kernels.reference(query, key, value, mask.dense(device), **rules)
            return compute(query, key, value, mask, **rules)

        with torch.enable_grad():
            synchronize(device)
            start = time.perf_counter()
            if recompute:
                with torch.no_grad():
                    run()
            gathered = run()
            gathered.backward(torch.ones_like(gathered))
            synchronize(device)
            cost.seconds += time.perf_counter() - start
            with _saved_bytes(leaves) as saved:
                gathered = run()
        kept = sum(saved.values())
        cost.kept_bytes = max(cost.kept_bytes, kept) if recompute else cost.kept_bytes + kept
        return gathered.detach()

    with modes_kept(model), torch.no_grad():
        model.train(dropout)
        kernels.attend = probe
        try:
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                model(inputs.to(device))
        finally:
            kernels.attend = compute
    return cost if calls else None


@contextmanager
def _saved_bytes(leaves: tuple[Tensor, ...]) -> Iterator[dict[int, int]]:
    """Collect bytes by address of all that autograd saves within the block, except the storages of `leaves`."""
    saved: dict[int, int] = {}
    own = {each.untyped_storage().data_ptr() for each in leaves}
    alive = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
