"""Which sequences of a batch go on."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from rehead.errors import UsageError


def selected(rows: Tensor | Sequence[int | bool], batch_size: int) -> Int[Tensor, " B"]:
    """Return the indices of sequences in `rows`, or of those that are True there; refuse any beyond the batch."""
    rows = torch.as_tensor(rows)
    where = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows
    if (rows is not where and len(rows) != batch_size) or not bool(
        ((where >= 0) & (where < batch_size)).all()
    ):
        raise UsageError(
            f"rows {rows.tolist()!s:.80}: the caches hold the sequences 0 to {batch_size - 1}. Give indices of them, "
            f"or {batch_size} times True or False."
        )
    return where
