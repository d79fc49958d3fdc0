"""Few queries over many keys: the G query heads of a KV head are folded into the query axis."""

import torch
from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel
from rehead.attention.kernels.definition import softmax

FEW_QUERIES = {torch.float64: 4, torch.float32: 4, torch.float16: 4, torch.bfloat16: 8}
"""Number of queries up to which the kernel is the fastest (decoding, short chunks); measured, docs/log.md."""


class Folded(Kernel):
    """Two matrix products per KV head; keys and values are read once and not repeated."""

    name = "folded"
    words = "query heads folded into rows"

    def limit(self, call: Call) -> str | None:
        """Accept up to `FEW_QUERIES` queries."""
        return None if call.query.shape[1] <= FEW_QUERIES[call.query.dtype] else "many queries"

    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute the call."""
        query, key, value = call.query, call.key, call.value
        batch, n_query, n_kv_head = query.shape[0], query.shape[1], key.shape[2]
        query = query.unflatten(2, (n_kv_head, -1)).permute(0, 2, 3, 1, 4)  # B K G L E
        scores = query.flatten(2, 3) @ key.permute(0, 2, 3, 1) * call.scale
        dense = call.mask.dense(query.device)
        if dense is not None:
            dense = dense[:, None, None].expand(batch, 1, query.shape[2], -1, -1).flatten(2, 3)  # B 1 GL S
        context = softmax(scores, dense) @ value.transpose(1, 2)  # B K GL V
        return context.unflatten(2, (-1, n_query)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # B L H V
