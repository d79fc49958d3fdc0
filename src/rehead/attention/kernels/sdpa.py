"""PyTorch's fused attention."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel


class SDPA(Kernel):
    """`torch.nn.functional.scaled_dot_product_attention`: O(L) memory in training and prefill, except for the mask."""

    name = "SDPA"
    words = "SDPA"
    drops_weights = True

    def limit(self, call: Call) -> str | None:
        """Return None: every call is accepted."""
        return None

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call."""
        query, key, value = (t.transpose(1, 2) for t in of_one_width(call.query, call.key, call.value))
        square = call.mask.is_causal_square
        dense = None if square else call.mask.dense(query.device)
        group = query.shape[1] // key.shape[1]
        if group > 1 and query.is_cuda and (query.dtype == torch.float32 or dense is not None):
            # no fused kernel there takes shared heads in float32 or with a mask: all weights would be kept
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        context = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if dense is None else dense[:, None],
            dropout_p=call.pdrop,
            is_causal=True if square else False,  # noqa: SIM210 - a bool, also while lengths are symbols
            scale=call.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return context.transpose(1, 2)[..., : call.value.shape[-1]]


def of_one_width(*tensors: Tensor, multiple_of: int = 1) -> tuple[Tensor, ...]:
    """Zero-pad the last axis of all tensors to the widest, rounded up to `multiple_of`; zeros change no product."""
    width = max(t.shape[-1] for t in tensors)
    width = -(-width // multiple_of) * multiple_of
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)
