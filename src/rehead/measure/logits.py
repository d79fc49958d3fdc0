"""Cross entropy over a large vocabulary, with the logits of a few tokens at a time."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from rehead.data import IGNORE

LOGITS = 2**23 - 2**10
"""Logits held at a time: in float32 just below 32 MB, the largest block that glibc keeps when it is freed.

A block of 2,048 tokens of a vocabulary of 151,936 has 37 times as many.
"""


def in_parts(n_token: int, *rows: Tensor, most: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of equally many rows in parts of at most `most` (or `LOGITS`) logits, `n_token` per row."""
    size = max(1, (LOGITS if most is None else most) // n_token)
    return zip(*(tensor.split(size) for tensor in rows), strict=True)


def cross_entropy(
    head: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "N D"],
    targets: Int[Tensor, " N"],
    reduction: str = "none",
) -> Float[Tensor, "..."]:
    """Return the loss in nats of each token, or by `reduction` their sum or mean, in float32 or wider.

    `head` gives the logits, all of them at once. Targets of -100 lose 0.
    """
    logits = head(hidden)
    exact = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(exact), targets, ignore_index=IGNORE, reduction=reduction)
