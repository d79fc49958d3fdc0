"""Turns logits into the next token."""

import math
import sys
from numbers import Integral, Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rehead.errors import NumericError, UsageError

EXAMPLES = {"temperature": "0 (always the likeliest token) or more, like 0.8", "top_k": "50", "top_p": "0.9"}


def require_valid(temperature: int | float, top_k: int | None, top_p: int | float | None) -> None:
    """Raise UsageError for settings that do not define a distribution."""
    for name, value in (("temperature", temperature), ("top_k", top_k or 1), ("top_p", top_p or 1)):
        whole = name == "top_k"
        if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
            raise UsageError(f"{name}={value!r} is not a {'whole ' * whole}number. Use {EXAMPLES[name]}.")
    if not 0 <= temperature <= sys.float_info.max:
        raise UsageError(f"temperature={temperature}. Use 0 (always the likeliest token) or more, like 0.8.")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k={top_k}: the number of tokens to keep. Use 1 or more, or leave it out.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p}: the probability to keep. Use more than 0, at most 1.")


def require_finite(logits: Float[Tensor, "B N"]) -> None:
    """Raise NumericError for logits that are not finite."""
    if not math.isfinite(logits.sum(dtype=torch.float64)):
        raise NumericError("the model's logits are not finite: its weights are damaged, or it has diverged.")


def probabilities(
    logits: Float[Tensor, "B N"],
    temperature: int | float = 1.0,
    top_k: int | None = None,
    top_p: int | float | None = None,
) -> Float[Tensor, "B N"]:
    """Return the softmax at `temperature` over the `top_k` likeliest tokens, cut to the fewest that hold `top_p`.

    Temperature 0 gives the likeliest token all the probability. Raises NumericError for logits that are
    not finite.
    """
    require_finite(logits)
    logits = logits.float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    if top_k is not None and top_k < logits.shape[-1]:
        likeliest = logits.topk(top_k).indices
        dropped = torch.ones_like(logits, dtype=torch.bool).scatter(-1, likeliest, False)
        logits = logits.masked_fill(dropped, float("-inf"))
    below = logits.double()
    below -= below.amax(dim=-1, keepdim=True)  # the largest stays 0 at any temperature
    likely = below.div_(float(temperature)).softmax(dim=-1).float()
    del below
    if top_p is not None and top_p < 1:
        ordered, order = likely.sort(dim=-1, descending=True)
        least = max(top_p, torch.finfo(ordered.dtype).tiny)  # not 0, so that the likeliest token stays
        before = ordered.cumsum(dim=-1) - ordered
        dropped = torch.zeros_like(likely, dtype=torch.bool).scatter(-1, order, before >= least)
        likely = likely.masked_fill(dropped, 0.0)
        likely = likely / likely.sum(dim=-1, keepdim=True)
    return likely


def draw(likely: Float[Tensor, "B N"], noise: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return the token at which the running sum of probabilities passes `noise`, uniform in [0, 1)."""
    running = likely.double().cumsum(dim=-1)
    target = noise.double()[:, None] * running[:, -1:]
    token = torch.searchsorted(running, target, right=True).squeeze(1)
    return token.clamp(max=likely.shape[-1] - 1)
