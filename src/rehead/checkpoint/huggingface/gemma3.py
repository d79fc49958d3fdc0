"""Gemma 3's language model: five layers with a window and a rope of their own to one without; norms in the heads."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rehead.attention import GroupedConfig, RopeConfig
from rehead.attention.score import ScaledDot
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.gemma2 import Gemma2, scalar_of
from rehead.checkpoint.huggingface.llama import FULL, SLIDING
from rehead.checkpoint.huggingface.rope import RopeKeys, merged, rope_of, scaling_table
from rehead.config import GPTConfig
from rehead.errors import InvalidInput


class Gemma3Text(Gemma2):
    """Keys and queries are normed per head, by norms like all others; caps are rare."""

    architecture = "Gemma3ForCausalLM"
    sizes: ClassVar[dict[str, int]] = {
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "vocab_size": 262_208,
    }
    rope = RopeKeys(theta=1_000_000.0)
    local = RopeKeys(theta=10_000.0, theta_key="rope_local_base_freq")
    differ = ("window", "rope")
    qk_norm = ("zero_centered_rmsnorm", "head")
    caps: ClassVar[dict[str, float | None]] = dict.fromkeys(Gemma2.caps)

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer: those with a window have the local rope."""
        if fields.look("attn_logit_softcapping", float, None) is not None:
            raise InvalidInput(
                f"{fields.where}: attn_logit_softcapping: transformers' class caps these scores or not, by the "
                "attention it was loaded with. Set it to null if the model was trained without."
            )
        layers = super().layers(fields, sizes, shared)
        nested = fields.take("rope_parameters", dict, {})
        if others := nested.keys() - {FULL, SLIDING}:
            raise InvalidInput(
                f"{fields.where}: rope_parameters has {', '.join(map(repr, others)):.80}: expected {FULL} and "
                f"{SLIDING}."
            )
        local = rope_of(
            merged(fields, _table(nested, SLIDING, fields.where), self.local, {}),
            sizes.length,
            self.local,
            fields.where,
        )
        return [replace(layer, rope=local) if layer.window is not None else layer for layer in layers]

    def read_rope(self, fields: Fields, length: int) -> RopeConfig:
        """Return the rope of layers without a window."""
        nested = fields.look("rope_parameters", dict, {})
        old = fields.take("rope_scaling", dict, {})
        return rope_of(
            merged(fields, _table(nested, FULL, fields.where), self.rope, old),
            length,
            self.rope,
            fields.where,
        )

    def write_rope(self, config: GPTConfig) -> Table:
        """Return the keys of both ropes."""
        tables, flat = {}, {}
        for kind, keys, has_window in ((FULL, self.rope, False), (SLIDING, self.local, True)):
            ropes = [layer.rope for layer in config.attention if (layer.window is not None) == has_window]
            rope = ropes[0] if ropes and ropes[0] is not None else RopeConfig(theta=keys.theta)
            tables[kind] = {"rope_theta": rope.theta, **scaling_table(rope, config.block_size)}
            flat[keys.theta_key] = rope.theta
        scaling = {name: value for name, value in tables[FULL].items() if name != "rope_theta"}
        old = {"rope_scaling": None if scaling["rope_type"] == "default" else scaling}
        return {"rope_parameters": tables, **flat, **old}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name other scores, and ropes that differ between layers of one kind."""
        ropes = {(layer.window is None, layer.rope) for layer in config.attention}
        return super().unsupported(config, first) | {
            "score": type(first.score) is not ScaledDot or scalar_of(first) ** -0.5 != first.scale,
            "different ropes": len(ropes) > len({has_none for has_none, _ in ropes}),
        }

    def slides(self, fields: Fields, n_layer: int) -> list[bool]:
        """Return which layers have the window where config.json does not say it."""
        every = fields.take("sliding_window_pattern", int, 6)
        fields.take("_sliding_window_pattern", int, 6)  # what transformers writes of it and does not read
        if every < 1:
            raise InvalidInput(f"{fields.where}: sliding_window_pattern={every}. Use 1 or more.")
        return [(index + 1) % every != 0 for index in range(n_layer)]


def _table(nested: Table, kind: str, where: str) -> Table:
    """Return the table of one kind of layer."""
    table = nested.get(kind) or {}
    if not isinstance(table, dict):
        raise InvalidInput(f"{where}: rope_parameters of {kind} is {table!r:.40}: expected a table.")
    return table


families.add("gemma3_text")(Gemma3Text())
