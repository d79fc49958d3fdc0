"""The parts of a decoder layer that are not attention."""

from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.attention import AttentionConfig, LayerCache
from rehead.attention.program import Add, Gate, Norm, Program, Slot
from rehead.config import GPTConfig
from rehead.nn.dropout import Dropout
from rehead.nn.gelu import gelu
from rehead.nn.linear import Linear

NORMS: dict[str, Callable[[int, float], nn.Module]] = {"layernorm": nn.LayerNorm, "rmsnorm": nn.RMSNorm}


class GELU(nn.Module):
    """GPT-2's MLP: down(gelu(up x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widths = config.n_hidden, config.n_embd
        self.up_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.down_proj = Linear(config.n_hidden, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Apply the MLP to each position."""
        return self.down_proj(gelu(self.up_proj(x)))

    def lower(self, program: Program, x: Slot) -> Slot:
        """Append the operations of one token."""
        n_hidden, width = self.widths
        (up,) = program.linear(x, (self.up_proj, n_hidden), gelu=True)
        (down,) = program.linear(up, (self.down_proj, width))
        return down


class SwiGLU(nn.Module):
    """Llama's MLP: down(silu(gate x) * up x) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.widths = config.n_hidden, config.n_embd
        self.gate_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.up_proj = Linear(config.n_embd, config.n_hidden, bias=config.mlp_bias)
        self.down_proj = Linear(config.n_hidden, config.n_embd, bias=config.mlp_bias)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Apply the MLP to each position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def lower(self, program: Program, x: Slot) -> Slot:
        """Append the operations of one token."""
        n_hidden, width = self.widths
        gate, up = program.linear(x, (self.gate_proj, n_hidden), (self.up_proj, n_hidden))
        (down,) = program.linear(program.add(Gate(gate, up)), (self.down_proj, width))
        return down


MLPS: dict[str, Callable[[GPTConfig], nn.Module]] = {"gelu": GELU, "swiglu": SwiGLU}


class Block(nn.Module):
    """x + scale * attention(norm x), then x + scale * mlp(norm x); names are Llama's in Hugging Face."""

    def __init__(self, config: GPTConfig, attention: AttentionConfig) -> None:
        super().__init__()
        norm = NORMS[config.norm]
        self.input_layernorm = norm(config.n_embd, config.norm_eps)
        self.self_attn = attention.build(config.n_embd)
        self.post_attention_layernorm = norm(config.n_embd, config.norm_eps)
        self.mlp = MLPS[config.mlp](config)
        self.resid_dropout = Dropout(config.resid_pdrop)
        self.scale = config.residual_scale

    def forward(
        self,
        x: Float[Tensor, "B L D"],
        positions: Int[Tensor, "#B L"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Apply attention and MLP, each with its residual connection."""
        attended = self.self_attn(self.input_layernorm(x), positions=positions, cache=cache)
        x = self._add(x, attended)
        return self._add(x, self.mlp(self.post_attention_layernorm(x)))

    def lower(self, program: Program, x: Slot, layer: int) -> Slot:
        """Append the operations of one token."""
        normed = program.add(Norm(x, self.input_layernorm))
        x = program.add(Add(program.call(self.self_attn, normed, x.width, layer), x, self.scale))
        normed = program.add(Norm(x, self.post_attention_layernorm))
        return program.add(Add(program.call(self.mlp, normed, x.width), x, self.scale))

    def _add(self, x: Tensor, update: Tensor) -> Tensor:
        """Add a scaled update to the residual stream, with dropout."""
        update = self.resid_dropout(update)
        return x + (update if self.scale == 1 else update * self.scale)
