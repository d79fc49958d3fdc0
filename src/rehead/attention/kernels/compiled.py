"""Many queries in rehead's own C++ (native/sequence.cpp), with gradients, windows and dropout.

Runs on a CPU with a compiler and computes in float32. Masked tiles are skipped. Weights are kept one tile at a
time; the backward pass recomputes them, reusing the saved dropout draws.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.mask import Mask
from rehead.native import sequence as bindings
from rehead.nn.dropout import raw_draw, threshold

WIDENED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that are computed in float32."""
TILE = 32
"""Number of queries that a thread takes at a time, as in sequence.cpp."""
LONGEST = 4096
"""Number of keys up to which, without a window, it is faster than PyTorch's flash attention; see docs/log.md."""


class Compiled(Kernel):
    """One call of native/sequence.cpp. Without a window it drops the same weights as `Blocked` in a single block."""

    name = "C++"
    words = "the C++ attention kernel"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """Refuse calls that it cannot compute, and calls that other kernels compute faster."""
        query, key, mask = call.query, call.key, call.mask
        tensors = query, key, call.value
        if not mask.has_rule:
            return "positions are given"
        if query.dtype not in WIDENED or any(t.dtype != query.dtype for t in tensors):
            return "not in float32, bfloat16 or float16"
        if any(len(t) != len(query) for t in tensors):
            return "keys are shared by several sequences"
        if any(not t.numel() for t in tensors):
            return "nothing to compute"
        if (refusal := bindings.refuses(*tensors)) is not None:
            return refusal
        if call.pdrop:  # whatever the number of threads, which must not change the weights that are dropped
            return None
        needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        n_task = len(key) * key.shape[2] * (1 if needs_grad else -(-query.shape[1] // TILE))
        if n_task < torch.get_num_threads():
            return "less work than threads"
        if not _window(mask) and mask.n_key > LONGEST:
            return "too many keys, without a window"
        return None

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call in C++."""
        query, mask = call.query, call.mask
        window, draws = _window(mask), None
        if call.pdrop:
            batch, n_query, n_head, _ = query.shape
            draws = raw_draw((batch, n_head, n_query, window or mask.n_key))
        q, k, v = query.float(), call.key.float(), call.value.float()
        gathered = bindings.attend(q, k, v, draws, mask.causal, window, threshold(call.pdrop), call.scale)
        return gathered.to(query.dtype)


def _window(mask: Mask) -> int:
    """Number of keys that a query sees; 0 without a window that hides some."""
    return mask.window if mask.causal and mask.window is not None and mask.window < mask.n_key else 0
