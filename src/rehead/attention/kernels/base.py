"""What a kernel is: it takes a call or says why not, and computes it."""

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
    """One attention call: what each query gathers of the values it sees.

    Query head h reads KV head h // (H/K). `scale` multiplies the dot products; a learned `score`
    replaces both. `pdrop` is the probability with which a weight is dropped.
    """

    query: Float[Tensor, "B L H E"]
    key: Float[Tensor, "B S K E"]
    value: Float[Tensor, "B S K V"]
    mask: Mask
    scale: float
    score: ScoreFunction | None = None
    pdrop: float = 0.0


class Kernel(ABC):
    """One way to compute a call, equal to `reference` within rounding.

    `name` is what errors and tests call it, `words` what people read, `takes_scores` and
    `drops_weights` what it can do beyond scaled dot products.
    """

    name: ClassVar[str]
    words: ClassVar[str]
    takes_scores: ClassVar[bool] = False
    drops_weights: ClassVar[bool] = False

    def refuses(self, call: Call) -> str | None:
        """Why this kernel does not compute the call; None if it does.

        Reads sizes, dtypes, devices and the mask's rule, never numbers.
        """
        if call.score is not None and not self.takes_scores:
            return "a learned score"
        if call.pdrop and not self.drops_weights:
            return "weights are dropped"
        return self.limit(call)

    @abstractmethod
    def limit(self, call: Call) -> str | None:
        """`refuses`, of calls whose score and dropout it can compute."""

    @abstractmethod
    def run(self, call: Call) -> Float[Tensor, "B L H V"]:
        """The result of a call that it does not refuse."""
