"""Chooses the kernel for a call of `forward`: the first of `ROSTER` that does not refuse it.

Tokens that a program decodes do not use the roster (`attention/program.py`, `decoding/`); short chunks, and layers
without a `lower`, do.
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
from rehead.errors import UsageError

ROSTER: tuple[Kernel, ...] = (
    Folded(),  # few queries: keys are read once
    Compiled(),  # skips most hidden keys
    Flash(),
    Windowed(),  # PyTorch's kernels also compute the keys that a window hides
    Blocked(),  # PyTorch's dropout stores the weights three times
    Continued(),
    SDPA(),
    Reference(),
)
"""Kernels in order of preference, as measured (docs/log.md). The last one refuses no call."""


@dataclass(frozen=True)
class Choice:
    """The kernel that computes a call, and the reasons against the kernels before it in the roster.

    `form` names the form in which a layer with several (MLA: expanded, absorbed, half absorbed) computes the call.
    """

    kernel: Kernel
    against: dict[str, str]
    form: str = ""


def choose(call: Call) -> Choice:
    """Return the first kernel of the roster that does not refuse the call."""
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
    """Compute `reference` with the kernel that `choose` returns. `scale` defaults to E ** -0.5.

    Raises UsageError for a mask of other sizes.
    """
    sizes = query.shape[1], key.shape[1]
    if (mask.n_query, mask.n_key) != sizes:
        raise UsageError(
            f"the mask is of {mask.n_query} queries and {mask.n_key} keys, and the call has {sizes[0]} and {sizes[1]}. "
            f"Build it with Mask(n_query={sizes[0]}, n_key={sizes[1]})."
        )
    scale = float(key.shape[-1] ** -0.5) if scale is None else scale
    call = Call(query, key, value, mask, scale, score, pdrop)
    return choose(call).kernel.run(call)
