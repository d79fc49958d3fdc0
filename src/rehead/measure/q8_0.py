"""llama.cpp's format of 8 bits a number: 32 numbers of a row are whole numbers times one scale."""

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK, STEPS = 32, 127
"""Numbers that share a scale, and whole numbers on either side of 0."""


def q8_0(weight: Float[Tensor, "*N E"]) -> Float[Tensor, "*N E"]:
    """Return rows as read back from llama.cpp's format: 32 numbers are whole numbers times one scale, a float16."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / STEPS
    whole = blocks * torch.where(scale > 0, 1 / scale, 0)
    whole = whole.sign() * (whole.abs() + 0.5).floor()  # halves away from 0
    return (whole * scale.to(torch.float16).float()).flatten(-2).to(weight.dtype)
