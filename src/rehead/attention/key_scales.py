"""Scores of normed keys without rebuilding them: a key's RMSNorm divides by one number; the cache keeps its inverse.

With W_UK c the unnormed key of a latent c, q . (w * W_UK c / rms) is (W_UK^T (w * q)) . c / rms: the score of an
absorbed query, times 1 / RMS.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


def inverse_rms(key: Float[Tensor, "*B E"], eps: float) -> Float[Tensor, "*B"]:
    """Return 1 / RMS of every key, computed in at least float32 as in `nn.RMSNorm`."""
    square = key.to(torch.promote_types(key.dtype, torch.float32)).square().mean(dim=-1)
    return (square + eps).rsqrt().to(key.dtype)


def are_plain(*norms: nn.Module | None) -> bool:
    """Whether all norms are exactly `nn.RMSNorm`, unpatched, so that weight and eps say all that they compute."""
    return all(type(norm) is nn.RMSNorm and "forward" not in vars(norm) for norm in norms)


class NormedScore:
    """Scores of absorbed queries, times `scale` and each key's 1 / RMS; `query` is unabsorbed but weighted."""

    words = "a scale for each key"

    def __init__(
        self,
        query: Float[Tensor, "B L K G E"],
        key_bias: Float[Tensor, "K E"] | None,
        key_scales: Float[Tensor, "B S K"],
        scale: float,
    ) -> None:
        self.heads, self.shift = query.shape[2:4], torch.zeros((), dtype=query.dtype, device=query.device)
        if key_bias is not None:  # the part of a score that does not depend on the latent, but is divided too
            self.shift = torch.einsum("blkge,ke->bkgl", query, key_bias)[..., None]
        self.scales = key_scales.transpose(1, 2)[:, :, None, None] * scale  # B K 1 1 S

    def __call__(self, absorbed: Float[Tensor, "B L 1 H R"], latent: Float[Tensor, "B S 1 R"]) -> Tensor:
        """Return the scores, B 1 H L S."""
        products = torch.einsum("blohr,bsor->bhls", absorbed, latent).unflatten(1, self.heads)
        return ((products + self.shift) * self.scales).flatten(1, 2)[:, None]
