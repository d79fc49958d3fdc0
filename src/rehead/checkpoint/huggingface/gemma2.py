"""Gemma 2: four norms in a layer, with weights around 0; GeGLU; soft caps; a window in every second layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rehead.attention import GroupedConfig
from rehead.attention.score import ScaledDot, ScoreConfig, SoftCapped
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.granite import score_of
from rehead.checkpoint.huggingface.llama import (
    WINDOW,
    LlamaLike,
    Windows,
    which_slide,
    window_words,
    windowed,
)
from rehead.config import GPTConfig

SMALLEST = 1e-150
"""A smaller factor of the scores has no scalar: `scale**-2` would be too large."""


class Gemma2(LlamaLike):
    """Embeddings times the root of the width; scores over the root of `query_pre_attn_scalar`."""

    architecture = "Gemma2ForCausalLM"
    tied = True
    activation = "hidden_activation"
    block: ClassVar[Table] = {"norm": "zero_centered_rmsnorm", "mlp": "geglu", "norm_position": "both"}
    says = ("logit_softcap",)
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 4, "head_dim": 256}
    names: ClassVar[dict[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    reads: ClassVar[tuple[str, ...]] = ("scales", "score")
    windows = Windows.SOME
    caps: ClassVar[dict[str, float | None]] = {
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    """Soft caps of missing keys; null means none."""

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, with a window or without."""
        scalar = fields.take("query_pre_attn_scalar", float, 256.0)
        cap = self.cap(fields, "attn_logit_softcapping")
        layers = [
            replace(layer, score=capped(scalar, cap, layer.head_dim))
            for layer in super().layers(fields, sizes, shared)
        ]
        window = fields.take("sliding_window", int, WINDOW, null=None)
        return windowed(layers, which_slide(fields, self.slides(fields, len(layers))), window)

    def slides(self, fields: Fields, n_layer: int) -> list[bool]:
        """Return which layers have the window where config.json does not say it."""
        return [index % 2 == 0 for index in range(n_layer)]

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return none, but refuse another activation and attention in both directions."""
        fields.expect("hidden_act", "gelu_pytorch_tanh")
        fields.expect("use_bidirectional_attention", False)
        return {}

    def cap(self, fields: Fields, name: str) -> float | None:
        """Return a soft cap; None for none."""
        cap: float | None = fields.take(name, float, self.caps[name], null=None)
        return cap

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the scale of the embeddings and the cap of the logits."""
        cap = self.cap(fields, "final_logit_softcapping")
        scale = max(sizes.width, 1) ** 0.5
        return super().extra_config(fields, sizes) | {"embed_scale": scale, "logit_softcap": cap}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also other scales and scores."""
        scales = (config.embed_scale, config.residual_scale, config.logit_scale)
        return super().unsupported(config, first) | {
            "scales": scales != (config.n_embd**0.5, 1.0, 1.0),
            "score": type(first.score) not in (ScaledDot, SoftCapped)
            or scalar_of(first) ** -0.5 != first.scale,
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head != 0,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return which layers have the window, the score and the caps."""
        words = window_words(config)
        return super().extra_json(config, first) | {
            **words,
            "sliding_window": words["sliding_window"] or WINDOW,  # read even where no layer slides
            "query_pre_attn_scalar": scalar_of(first),
            "attn_logit_softcapping": first.score.cap if isinstance(first.score, SoftCapped) else None,
            "final_logit_softcapping": config.logit_softcap,
        }


def capped(scalar: float, cap: float | None, head_dim: int) -> ScoreConfig:
    """Return the dot product over the root of a number, with a soft cap or without."""
    dot = score_of(scalar**-0.5 if scalar > 0 else 0.0, head_dim)
    return dot if cap is None else SoftCapped(cap=cap, scale=dot.scale)


def scalar_of(layer: GroupedConfig) -> int:
    """Return `query_pre_attn_scalar`, a whole number in this format."""
    return max(1, round(layer.scale**-2)) if layer.scale > SMALLEST else 1


families.add("gemma2")(Gemma2())
