"""Llama and the families that share its names: Mistral, Qwen2 and Qwen3."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from rehead.attention import GroupedConfig
from rehead.attention.score import ScaledDot
from rehead.checkpoint.huggingface.base import Fields, Table, different, families
from rehead.checkpoint.huggingface.decoder import Decoder, Sizes
from rehead.config import GPTConfig
from rehead.errors import InvalidInput

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 4096
"""Window of Mistral and Qwen if config.json does not name it."""


class LlamaLike(Decoder[GroupedConfig]):
    """MHA, GQA or MQA with rope; the families differ in biases, norms, windows and what else their files say."""

    attention = GroupedConfig
    attention_words = "attention"
    differ: ClassVar[tuple[str, ...]] = ("window",)
    """Fields of the attention in which layers may differ."""
    heads: ClassVar[dict[str, int]] = {}
    """Defaults of missing keys, where they do not follow from other sizes."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Fields of the attention, of those that `unsupported` names, that this family can represent."""

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, all alike."""
        kind = GroupedConfig(
            **shared,
            n_kv_head=self.take_size(fields, "num_key_value_heads", sizes.n_query_head),
            head_dim=self.take_size(fields, "head_dim", sizes.head_dim),
            **self.attention_fields(fields, sizes),
        )
        return [kind] * sizes.n_layer

    def take_size(self, fields: Fields, name: str, derived: int) -> int:
        """Return a size of the heads; null means the one that follows from other sizes."""
        size: int = fields.take(name, int, self.heads.get(name, derived), null=derived)
        return size

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return further fields of the attention."""
        return {}

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return whether the MLP has biases."""
        return {"mlp_bias": fields.take("mlp_bias", bool, False)}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name what no class of this kind can represent, unless it is among `reads`."""
        ropes = [layer.rope for layer in config.attention]
        whole = [rope.partial_rotary_factor == 1 for rope in ropes if rope is not None]
        alike: dict[str, Any] = dict.fromkeys(self.differ)
        plain = [replace(layer, **alike) for layer in config.attention]
        refused = {
            "scales": config.scaled,
            "rope": any(rope is None for rope in ropes),
            "rope_layout": any(rope is not None and rope.layout != self.rope.layout for rope in ropes),
            "partial_rotary_factor": self.rope.partial is None and not all(whole),
            "head_map": first.head_map != "contiguous" and 1 < first.n_kv_head < first.n_query_head,
            "score": first.score != ScaledDot(),
            "tie_kv": first.tie_kv,
            "v_head_dim": first.v_head_dim != first.head_dim,
            "qk_norm": (first.qk_norm, first.qk_norm_over) != ("rmsnorm", "head"),
            different(plain): len(set(plain)) > 1,
        }
        return {name: bad for name, bad in refused.items() if name not in self.reads}

    def attention_json(self, first: GroupedConfig) -> Table:
        """Return the number of KV heads, and the width of all heads."""
        return {"num_key_value_heads": first.n_kv_head, "head_dim": first.head_dim}

    def attention_weights(self, layer: GroupedConfig) -> list[str]:
        """Return four projections, biases, and the norms of queries and keys."""
        names = [f"{part}_proj.weight" for part in "qkvo"]
        names += [f"{part}_proj.bias" for part in "qkv"] if layer.qkv_bias else []
        names += ["o_proj.bias"] if layer.o_bias else []
        return names + (["q_norm.weight", "k_norm.weight"] if layer.qk_norm_eps else [])

    def canonical_name(self, name: str) -> str | None:
        """Return the name; None for the rotary angles that old files store for every layer."""
        return None if name.endswith("rotary_emb.inv_freq") else name


class Llama(LlamaLike):
    """Llama 2 and 3, SmolLM, and others of their shape."""

    architecture = "LlamaForCausalLM"

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return biases on all four projections, or on none."""
        bias = fields.take("attention_bias", bool, False)
        fields.expect("rope_interleaved", False)
        return {"qkv_bias": bias, "o_bias": bias}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also windows, norms in the heads, some biases without others."""
        return super().unsupported(config, first) | {
            "window": any(layer.window for layer in config.attention),
            "qk_norm_eps": first.qk_norm_eps is not None,
            "qkv_bias without o_bias": first.qkv_bias != first.o_bias,
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head != 0,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the biases."""
        return {"attention_bias": first.qkv_bias, "mlp_bias": config.mlp_bias}


class Mistral(LlamaLike):
    """A sliding window in every layer, or none."""

    architecture = "MistralForCausalLM"

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the window."""
        return {"window": window_of(fields)}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also windows that differ, norms in the heads, biases."""
        return super().unsupported(config, first) | {
            "different windows": len({layer.window for layer in config.attention}) > 1,
            "qk_norm_eps": first.qk_norm_eps is not None,
            "bias": first.qkv_bias or first.o_bias or config.mlp_bias,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the window."""
        return {"sliding_window": first.window}


def window_of(fields: Fields) -> int | None:
    """Return `sliding_window`: null means none, a missing key the class's default."""
    window: int | None = fields.take("sliding_window", int, WINDOW, null=None)
    return window


def which_slide(fields: Fields, default: list[bool]) -> list[bool]:
    """Return which layers have the window, by `layer_types`, or the default where the key is missing."""
    types = fields.take("layer_types", list, None)
    if types is None:
        return default
    if len(types) != len(default) or not all(name in (FULL, SLIDING) for name in types):
        raise InvalidInput(
            f"{fields.where}: layer_types={types!r:.80}: expected {len(default)} full or sliding ones."
        )
    return [name == SLIDING for name in types]


def windowed(layers: Sequence[GroupedConfig], slides: list[bool], window: int | None) -> list[GroupedConfig]:
    """Return the layers, those that slide with a window."""
    return [
        replace(layer, window=window if slide else None) for layer, slide in zip(layers, slides, strict=True)
    ]


def window_words(config: GPTConfig) -> Table:
    """Return the window, and which layers have it."""
    return {
        "sliding_window": next((layer.window for layer in config.attention if layer.window), None),
        "layer_types": [SLIDING if layer.window else FULL for layer in config.attention],
    }


class Qwen2(LlamaLike):
    """Biases on queries, keys and values; windows in the later layers, if any."""

    architecture = "Qwen2ForCausalLM"

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, with a window or without."""
        layers, window = super().layers(fields, sizes, shared), window_of(fields)
        if not fields.take("use_sliding_window", bool, False):
            window = None
        full = fields.take("max_window_layers", int, 28)
        slides = which_slide(fields, [index >= full for index in range(len(layers))])
        return windowed(layers, slides, window)

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return biases on three of the four projections."""
        return {"qkv_bias": True}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also several windows, and what `unsupported_heads` names."""
        return super().unsupported(config, first) | {
            "different windows": len({layer.window for layer in config.attention} - {None}) > 1,
            "mlp_bias": config.mlp_bias,
            **self.unsupported_heads(config, first),
        }

    def unsupported_heads(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name norms in the heads, other biases, other widths."""
        return {
            "qk_norm_eps": first.qk_norm_eps is not None,
            "bias": not first.qkv_bias or first.o_bias,
            "head_dim": first.head_dim * first.n_query_head != config.n_embd,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return which layers have the window."""
        words = window_words(config)
        slides = words["sliding_window"] is not None
        return {
            "use_sliding_window": slides,
            "max_window_layers": 0 if slides else config.n_layer,
            **words,
        }


class Qwen3(Qwen2):
    """Norms on queries and keys; biases on all four projections or on none."""

    architecture = "Qwen3ForCausalLM"

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return biases, and norms with the model's eps."""
        bias = fields.take("attention_bias", bool, False)
        return {"qkv_bias": bias, "o_bias": bias, "qk_norm_eps": sizes.norm_eps}

    def unsupported_heads(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name missing norms, norms of another eps, some biases without others."""
        return {
            "qk_norm_eps": first.qk_norm_eps != config.norm_eps,
            "qkv_bias without o_bias": first.qkv_bias != first.o_bias,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return which layers have the window, and biases."""
        return {**super().extra_json(config, first), "attention_bias": first.qkv_bias}


for name, kind in (("llama", Llama), ("mistral", Mistral), ("qwen2", Qwen2), ("qwen3", Qwen3)):
    families.add(name)(kind())
