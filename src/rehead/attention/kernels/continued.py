"""A chunk of queries after a long past, computed in two parts: the past without a mask, and the causal triangle."""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.kernels.sdpa import of_one_width

LONG = 512
"""Number of keys from which two parts are faster than one masked call (measured, docs/log.md)."""


class Continued(Kernel):
    """Two calls of PyTorch's flash attention for CPUs, merged by the log-sum-exp of their scores."""

    name = "continued"
    words = "past and triangle apart"

    def limit(self, call: Call) -> str | None:
        """Accept causal chunks after a long past, on a CPU without gradients."""
        if len(call.key) != len(call.query):
            return "keys are shared by several sequences"
        if call.query.device.type != "cpu" or torch.is_grad_enabled():
            return "not on a CPU without gradients"
        follows = call.mask.is_causal_chunk and call.mask.n_key >= LONG
        return None if follows else "no long past before the queries"

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute both parts and merge them."""
        past = call.key.shape[1] - call.query.shape[1]
        wide = of_one_width(call.query, call.key, call.value)
        # The operator takes the last axis as dense.
        dense = (t if t.stride(-1) == 1 else t.contiguous() for t in wide)
        query, key, value = (t.transpose(1, 2) for t in dense)
        outputs, logarithms = [], []
        for rows, is_causal in ((slice(past), False), (slice(past, None), True)):
            output, logarithm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key[:, :, rows], value[:, :, rows], 0.0, is_causal, scale=call.scale
            )
            outputs.append(output)
            logarithms.append(logarithm)
        shares = torch.stack(logarithms).softmax(dim=0)[..., None].to(query.dtype)
        context = outputs[0] * shares[0] + outputs[1] * shares[1]
        return context.transpose(1, 2)[..., : call.value.shape[-1]]
