"""Granite without experts: Llama with factors of the embeddings, the scores, every layer's output and the logits."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rehead.attention import GroupedConfig
from rehead.attention.score import ScaledDot
from rehead.checkpoint.huggingface.base import Fields, Table, families, written
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.llama import Llama
from rehead.config import GPTConfig


class Granite(Llama):
    """A missing factor is 1, also that of the scores."""

    architecture = "GraniteForCausalLM"
    reads = ("scales", "score")

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, with the factor of its scores."""
        scale = fields.take("attention_multiplier", float, 1.0)
        layers = super().layers(fields, sizes, shared)
        return [replace(layer, score=score_of(scale, layer.head_dim)) for layer in layers]

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the other three factors; logits are divided by theirs."""
        scaling = fields.take("logits_scaling", float, 1.0)
        return super().extra_config(fields, sizes) | {
            "embed_scale": fields.take("embedding_multiplier", float, 1.0),
            "residual_scale": fields.take("residual_multiplier", float, 1.0),
            "logit_scale": 1 / scaling if scaling else math.inf,
        }

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also other scores than the dot product."""
        return super().unsupported(config, first) | {"score": type(first.score) is not ScaledDot}

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the four factors, as numbers that read back as the same."""
        return super().extra_json(config, first) | {
            "attention_multiplier": first.scale,
            "embedding_multiplier": config.embed_scale,
            "residual_multiplier": config.residual_scale,
            "logits_scaling": written(1 / config.logit_scale, lambda one: 1 / one == config.logit_scale),
        }


def score_of(scale: float, head_dim: int) -> ScaledDot:
    """Return the dot product with a factor, which is left out if it is the usual one."""
    return ScaledDot(scale=None if scale == head_dim**-0.5 else scale)


families.add("granite")(Granite())
