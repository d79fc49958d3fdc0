"""What an Elman layer keeps of its past."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from rehead.attention.selection import selected


class StateCache:
    """The state of an Elman layer: h, (B, N), for a past of any length."""

    def __init__(self, state: Float[Tensor, "B N"]) -> None:
        self.state = state

    @property
    def n_bytes(self) -> int:
        """Bytes allocated."""
        return self.state.nbytes

    def select_batch(self, rows: Tensor | Sequence[int | bool]) -> None:
        """Replace sequence i by sequence `rows[i]`, or keep those whose `rows` are True."""
        self.state = self.state[selected(rows, len(self.state))]
