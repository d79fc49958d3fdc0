"""Where a cache puts the next token."""

from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class NextRow:
    """The row for the next token of every sequence, shared by all caches with the same number of rows and window."""

    slot: int | tuple[Int[Tensor, " B"], Int[Tensor, " B"]]
    """One slot for all sequences, or indices of sequences and the slot of each."""
    n_used: int
    """Number of rows in use, including this one; the others are not read."""
    known: Int[Tensor, "B S"] | None = None
    """The position of every row, including this one; `EMPTY` if unused. None while positions are consecutive."""
