"""Which kernel computes a call of `forward`: the first of `ROSTER` that does not refuse it.

A decoded token does not pass here: `lower` describes it (`attention/program.py`), and `decoding/` executes that.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from rehead.attention.kernels.base import Call, Kernel, ScoreFunction
from rehead.attention.kernels.blocked import Blocked
from rehead.attention.kernels.compiled import Compiled
from rehead.attention.kernels.continued import Continued
from rehead.attention.kernels.definition import Reference
from rehead.attention.kernels.flash import Flash
from rehead.attention.kernels.folded import Folded
from rehead.attention.kernels.sdpa import SDPA
from rehead.attention.kernels.windowed import Windowed
from rehead.attention.mask import Mask

ROSTER: tuple[Kernel, ...] = (
    Folded(),  # a decoded token reads its keys once
    Compiled(),  # computes little of what a mask hides
    Flash(),
    Windowed(),  # PyTorch's kernels compute all that a window hides
    Blocked(),  # PyTorch's dropout keeps the weights three times
    Continued(),
    SDPA(),
    Reference(),
)
"""In the order of preference, measured (docs/log.md). The last refuses nothing."""


@dataclass(frozen=True)
class Choice:
    """The kernel that computes a call, and why each kernel before it in the roster does not.

    `form` names the form in which a layer called, where it has several.
    """

    kernel: Kernel
    against: dict[str, str]
    form: str = ""


def choose(call: Call) -> Choice:
    """The first kernel of the roster that does not refuse the call."""
    against: dict[str, str] = {}
    for kernel in ROSTER:
        reason = kernel.refuses(call)
        if reason is None:
            break
        against[kernel.name] = reason
    return Choice(kernel, against)


def attend(
    query: Float[Tensor, "B L H E"],
    key: Float[Tensor, "B S K E"],
    value: Float[Tensor, "B S K V"],
    mask: Mask,
    *,
    scale: float | None = None,
    score: ScoreFunction | None = None,
    pdrop: float = 0.0,
) -> Float[Tensor, "B L H V"]:
    """`reference` of the same arguments, by the kernel that `choose` gives. `scale` is E ** -0.5 unless given."""
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    call = Call(query, key, value, mask, scale, score, pdrop)
    return choose(call).kernel.run(call)
