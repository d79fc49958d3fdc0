"""The MLPs of a decoder layer, by the names that a config gives them."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rehead.attention.program import Gate, Program
from rehead.attention.slot import Slot
from rehead.config import GPTConfig
from rehead.nn.gelu import gelu
from rehead.nn.linear import Linear


class GELU(nn.Module):
    """GPT-2's MLP: down(gelu(up x)); GELU's tanh form, or the exact one of `mlp=gelu_erf` (GPT-NeoX)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.form: Literal["tanh", "erf"] = "erf" if config.mlp == "gelu_erf" else "tanh"
        self.widths = config.n_hidden, config.n_embd
        self.up_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.down_proj = Linear(config.n_hidden, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Apply the MLP to each position."""
        up = self.up_proj(x)
        return self.down_proj(gelu(up) if self.form == "tanh" else F.gelu(up))

    def lower(self, program: Program, x: Slot) -> Slot:
        """Append the operations of one token."""
        n_hidden, width = self.widths
        (up,) = program.linear(x, (self.up_proj, n_hidden), gelu=self.form)
        (down,) = program.linear(up, (self.down_proj, width))
        return down


class GatedMLP(nn.Module):
    """Llama's MLP: down(silu(gate x) * up x), or Gemma's with GELU's tanh form (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.has_gelu = config.mlp == "geglu"
        self.widths = config.n_hidden, config.n_embd
        self.gate_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.up_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.down_proj = Linear(config.n_hidden, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Apply the MLP to each position."""
        gate = self.gate_proj(x)
        return self.down_proj((gelu(gate) if self.has_gelu else F.silu(gate)) * self.up_proj(x))

    def lower(self, program: Program, x: Slot) -> Slot:
        """Append the operations of one token."""
        n_hidden, width = self.widths
        gate, up = program.linear(x, (self.gate_proj, n_hidden), (self.up_proj, n_hidden))
        (down,) = program.linear(program.add(Gate(gate, up, self.has_gelu)), (self.down_proj, width))
        return down


MLPS: dict[str, Callable[[GPTConfig], nn.Module]] = {
    "gelu": GELU,
    "gelu_erf": GELU,
    "swiglu": GatedMLP,
    "geglu": GatedMLP,
}
