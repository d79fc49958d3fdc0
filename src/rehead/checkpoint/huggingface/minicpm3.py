"""MiniCPM3: MLA with scales of the embeddings, of every layer's output and of the logits."""

import math
from typing import ClassVar

from rehead.attention import LatentConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families, written
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.config import GPTConfig

DEFAULTS = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}
"""The class's defaults of missing keys in config.json; null means no scale."""

MOST = 2**53
"""A larger `dim_model_base` is replaced by this, so that `unsupported` finds a different scale and refuses it."""


class MiniCPM3(LatentLike):
    """MLA with three scales.

    Embeddings are multiplied by `scale_emb`, the output of each layer by `scale_depth` / sqrt(number of layers), and
    logits by `dim_model_base` / width.
    """

    architecture = "MiniCPM3ForCausalLM"
    tied = True
    norm_eps = 1e-5
    widths: ClassVar[dict[str, int]] = {"q_lora_rank": 768}
    layouts = ("half-split",)
    scales = True

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the three scales."""
        width, n_layer = sizes.width, sizes.n_layer
        neutral = {
            "scale_emb": 1.0,
            "scale_depth": math.sqrt(max(n_layer, 1)),
            "dim_model_base": float(width),
        }
        given = {
            name: fields.take(name, float, default, null=neutral[name]) for name, default in DEFAULTS.items()
        }
        return super().extra_config(fields, sizes) | {
            "embed_scale": given["scale_emb"],
            "residual_scale": given["scale_depth"] / math.sqrt(max(n_layer, 1)),
            "logit_scale": given["dim_model_base"] / width if width > 0 else 1.0,
        }

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name some widths and logit scales, too."""
        return super().unsupported(config, first) | {
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head > 0,
            "logit_scale, not a whole number over n_embd,": _base(config) / config.n_embd
            != config.logit_scale,
        }

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the three scales, as numbers that read back as the same."""
        root = math.sqrt(config.n_layer)
        return super().extra_json(config, first) | {
            "mlp_bias": False,
            "scale_emb": config.embed_scale,
            "scale_depth": written(
                config.residual_scale * root, lambda one: one / root == config.residual_scale
            ),
            "dim_model_base": _base(config),
        }


def _base(config: GPTConfig) -> int:
    """Return `dim_model_base`: the logit scale times the width."""
    return round(min(config.logit_scale * config.n_embd, MOST))


families.add("minicpm3")(MiniCPM3())
