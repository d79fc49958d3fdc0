"""SmolLM3: some layers without rope; sliding windows, if any, are by default in those layers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.llama import (
    SLIDING,
    LlamaLike,
    Windows,
    which_slide,
    window_words,
    windowed,
)
from rehead.checkpoint.huggingface.rope import RopeKeys
from rehead.config import GPTConfig
from rehead.errors import InvalidInput


class SmolLM3(LlamaLike):
    """Llama's layers, every fourth without rope by default."""

    architecture = "SmolLM3ForCausalLM"
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 4}
    tied = True
    rope = RopeKeys(theta=2_000_000.0)
    differ = ("window", "rope")
    reads = ("rope",)
    windows = Windows.SOME
    mlp_biased = True

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, rotated or not."""
        layers = super().layers(fields, sizes, shared)
        every = fields.take("no_rope_layer_interval", int, 4)
        if every < 1:
            raise InvalidInput(f"{fields.where}: no_rope_layer_interval={every}. Use 1 or more.")
        rotates = fields.take("no_rope_layers", list, None)
        rotates = [int((i + 1) % every != 0) for i in range(len(layers))] if rotates is None else rotates
        if len(rotates) < len(layers) or not all(one in (0, 1) for one in rotates):
            raise InvalidInput(
                f"{fields.where}: no_rope_layers={rotates!r:.80}: expected {len(layers)} of 1 (with rope) and 0 "
                "(without)."
            )
        window, uses = (
            fields.take("sliding_window", int, None),
            fields.take("use_sliding_window", bool, False),
        )
        default = [uses and window is not None and not rotated for rotated in rotates[: len(layers)]]
        slides = which_slide(fields, default)
        if any(slides) and window is not None and not uses:
            raise InvalidInput(
                f"{fields.where}: use_sliding_window=false with {SLIDING} in layer_types: transformers' class has this "
                "window or not, by the attention it was loaded with. Set it to true, or leave layer_types out."
            )
        layers = windowed(layers, slides, window)
        return [
            layer if rotated else replace(layer, rope=None)
            for layer, rotated in zip(layers, rotates, strict=False)
        ]

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also several ropes."""
        several = len({layer.rope for layer in config.attention} - {None}) > 1
        return super().unsupported(config, first) | {"different ropes": several}

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return which layers rotate and which have the window, and biases."""
        words = window_words(config)
        return super().extra_json(config, first) | {
            "use_sliding_window": words["sliding_window"] is not None,
            **words,
            "no_rope_layers": [int(layer.rope is not None) for layer in config.attention],
        }


families.add("smollm3")(SmolLM3())
