"""Sizes and FLOPs of the parts of one attention layer."""

from dataclasses import dataclass

import torch

from rehead.attention import AttentionConfig
from rehead.errors import ConfigError

KEYS_AND_VALUES = ("k_proj.", "v_proj.", "kv_a_proj_with_mqa.", "kv_b_proj.", "k_scale_proj.")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of one layer: `kv_parameters` of the projections to keys and values, without biases; rows and
    columns of the `output_projection`; FLOPs per sequence of the four projections, and of scores and sums of values.
    """

    kv_parameters: int
    output_projection: tuple[int, int]
    projection_flops: int
    attention_flops: int


def parts(attention: AttentionConfig, d_model: int, n_token: int) -> Parts:
    """Return the parts of an attention over `n_token` tokens of width `d_model`.

    FLOPs take account of a window, not of causality.
    """
    with torch.device("meta"):
        weights = dict(attention.build(d_model).named_parameters())
    sizes = (w.numel() for name, w in weights.items() if name.startswith(KEYS_AND_VALUES) and w.dim() == 2)
    if "o_proj.weight" not in weights:
        raise ConfigError(f"{attention.name} has no weight o_proj.weight. Name its output projection o_proj.")
    rows, columns = weights["o_proj.weight"].shape
    return Parts(
        kv_parameters=sum(sizes),
        output_projection=(rows, columns),
        projection_flops=n_token * attention.projection_flops(d_model),
        attention_flops=n_token * attention.attention_flops(min(n_token, attention.window or n_token)),
    )
