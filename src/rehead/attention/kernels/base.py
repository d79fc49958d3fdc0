"""The contract of a kernel: it refuses a call with a reason, or computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from rehead.attention.mask import Mask

ScoreFunction = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one attention call.

    Query head h reads KV head h // (H/K). `scale` multiplies the dot products; a learned `score`
    replaces both. `pdrop` is the dropout probability of a weight.
    """

    query: Float[Tensor, "B L H E"]
    key: Float[Tensor, "B S K E"]
    value: Float[Tensor, "B S K V"]
    mask: Mask
    scale: float
    score: ScoreFunction | None = None
    pdrop: float = 0.0


def words_of(score: object) -> str:
    """Return what a score other than the scaled dot product is, for messages."""
    return str(getattr(score, "words", "a learned score"))


class Kernel(ABC):
    """An implementation of attention that equals `reference` up to rounding.

    `name` identifies it in `Choice.against`, `words` describes it in reports. `takes_scores` and `drops_weights`
    tell whether it supports scores other than the scaled dot product, and dropout.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    takes_scores: ClassVar[bool] = False
    drops_weights: ClassVar[bool] = False

    def refuses(self, call: Call) -> str | None:
        """Return the reason why this kernel cannot compute the call; None if it can.

        Reads shapes, dtypes, devices and the mask's rule, never values.
        """
        if call.score is not None and not self.takes_scores:
            return words_of(call.score)
        if call.pdrop and not self.drops_weights:
            return "weights are dropped"
        return self.limit(call)

    @abstractmethod
    def limit(self, call: Call) -> str | None:
        """Return the result of `refuses` for a call whose score and dropout are supported."""

    @abstractmethod
    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """Compute a call that `refuses` accepts."""
