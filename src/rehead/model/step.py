"""One token more through a layer: what `Block.forward` computes, without what only longer texts need."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from rehead.attention import LayerCache
from rehead.attention.step import Moment, Product, Step
from rehead.model.layers import GELU, Block, SwiGLU

Rows = Callable[[Tensor], Tensor]
"""(B, D) to (B, D)."""


def mlp_rows(mlp: nn.Module) -> Rows:
    """An MLP of few rows; one that is neither of ours is called as it is."""
    if type(mlp) is GELU:
        up, down = Product(mlp.up_proj), Product(mlp.down_proj)
        return lambda x: down(F.gelu(up(x), approximate="tanh"))
    if type(mlp) is SwiGLU:
        both, down = Product(mlp.gate_proj, mlp.up_proj), Product(mlp.down_proj)

        def swiglu(x: Tensor) -> Tensor:
            gate, up = both(x).chunk(2, dim=-1)
            return down(F.silu(gate) * up)

        return swiglu
    return mlp


def layer_step(block: Block) -> Step:
    """One layer of one token; changes the stream it is given."""
    attend, mlp = block.self_attn.step(), mlp_rows(block.mlp)
    first, second = block.input_layernorm, block.post_attention_layernorm

    def step(x: Tensor, cache: LayerCache, moment: Moment) -> Tensor:
        x.add_(attend(first(x), cache, moment), alpha=block.scale)
        return x.add_(mlp(second(x)), alpha=block.scale)

    return step


def is_watched(model: nn.Module) -> bool:
    """True where somebody reads what passes through a part of the model, which a step would not show."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
