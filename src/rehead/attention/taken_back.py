"""What a cache no longer has after tokens were taken back."""

import torch
from jaxtyping import Int
from torch import Tensor

from rehead.errors import UsageError

OVERWRITTEN = (
    "the KV cache of a window has overwritten what an earlier token sees: read the text with a new cache."
)
REWRITTEN = (
    "a call that failed had been given positions again and has overwritten their rows in the KV cache: read the text "
    "with a new cache."
)


class TakenBack:
    """The newest token of each sequence that a cache has read, though it may no longer count it; -1 without any.

    In a ring of `n_row` rows it stands where another stood, so that an earlier token would not find all that it sees.
    Without a ring (`n_row` is None) only rows that were written anew are lost. All positions are on the CPU.
    """

    def __init__(self, n_row: int | None) -> None:
        self._n_row, self._rewritten = n_row, False
        self._newest: Int[Tensor, " #B"] | None = None  # None where every token read is still counted

    def __bool__(self) -> bool:
        """Whether a token that follows those counted may miss something."""
        return self._rewritten or self._newest is not None

    def note(self, before: Int[Tensor, " #B"], after: Int[Tensor, " #B"], *, rewritten: bool = False) -> None:
        """Note that the newest tokens counted were `before` and are `after`; a sequence without any has lost none.

        `rewritten` says that what is taken back wrote rows of tokens that are still counted.
        """
        newest = self._read(before)
        self._newest = torch.where(after >= 0, newest, -1) if bool((newest > after).any()) else None
        self._rewritten = bool((after >= 0).any()) and (self._rewritten or rewritten)

    def require(self, positions: Int[Tensor, "#B L"], counted: Int[Tensor, " #B"]) -> None:
        """Refuse tokens at `positions`, negative for padding, if they miss what they see; `counted` are the newest."""
        newest = self._read(counted)[:, None]
        missed = (positions >= 0) & (positions < newest) & (newest >= (self._n_row or 0))
        if self._rewritten:
            raise UsageError(REWRITTEN)
        if self._n_row is not None and bool(missed.any()):
            raise UsageError(OVERWRITTEN)

    def select(self, rows: Int[Tensor, " C"], batch_size: int) -> None:
        """Keep the sequences `rows` of `batch_size`."""
        if self._newest is not None:
            self._newest = self._newest.expand(batch_size)[rows]

    def _read(self, counted: Int[Tensor, " #B"]) -> Int[Tensor, " #B"]:
        return counted if self._newest is None else torch.maximum(counted, self._newest)
