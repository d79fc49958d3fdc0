"""Llama and those that share its names: Mistral, Qwen2 and Qwen3."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import (
    PARTS,
    Family,
    Fields,
    Table,
    Weight,
    families,
    outside_layers,
    refuse,
    write_rope,
)
from rehead.config import GPTConfig
from rehead.errors import InvalidInput

WINDOW = 4096
"""Of Mistral and Qwen where config.json does not name it."""


class LlamaLike(Family):
    """RMSNorm, SwiGLU, half-split rope; what differs between the four are biases, norms and windows.

    Dropout outside the attention has no field in these classes and is not kept.
    """

    def read(self, fields: Fields) -> GPTConfig:
        """The config that a config.json describes."""
        width, heads = fields.take("hidden_size", int), fields.take("num_attention_heads", int)
        n_layer = fields.take("num_hidden_layers", int)
        fields.expect("hidden_act", "silu")
        bias = fields.take("mlp_bias", bool, False)
        common: dict[str, Any] = {
            "n_query_head": heads,
            "n_kv_head": fields.take("num_key_value_heads", int, heads),
            "head_dim": fields.take("head_dim", int, width // heads if heads > 0 else 0),
            "attn_pdrop": fields.take("attention_dropout", float, 0.0),
        }
        eps = fields.take("rms_norm_eps", float, 1e-6)
        length = fields.take("max_position_embeddings", int)
        common["rope"] = fields.rope(length)
        attention = tuple(self.layers(fields, common, eps, n_layer))
        config = GPTConfig(
            vocab_size=fields.take("vocab_size", int),
            block_size=length,
            n_embd=width,
            attention=attention,
            learned_positions=False,
            norm="rmsnorm",
            norm_eps=eps,
            mlp="swiglu",
            n_hidden=fields.take("intermediate_size", int),
            mlp_bias=bias,
            tie_embeddings=fields.take("tie_word_embeddings", bool, False),
        )
        fields.finish()
        return config

    @abstractmethod
    def layers(self, fields: Fields, common: Table, eps: float, n_layer: int) -> list[GroupedConfig]:
        """The attention of every layer."""

    def write(self, config: GPTConfig) -> Table:
        """The config.json of a model."""
        first = _plain(config, self.architecture)
        return {
            "architectures": [self.architecture],
            "model_type": families.name_of(self),
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_hidden,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": first.n_query_head,
            "num_key_value_heads": first.n_kv_head,
            "head_dim": first.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.block_size,
            "rms_norm_eps": config.norm_eps,
            "attention_dropout": first.attn_pdrop,
            "tie_word_embeddings": config.tie_embeddings,
            **write_rope(first.rope, config.block_size),
            **self.said(config, first),
        }

    @abstractmethod
    def said(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """What this family has fields of its own for; refuses the rest."""

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Names are ours with `model.` before them."""
        yield from outside_layers(config)
        for index, kind in enumerate(config.attention):
            assert isinstance(kind, GroupedConfig)
            names = [f"{part}.weight" for part in PARTS]
            names += [f"self_attn.{part}_proj.weight" for part in "qkvo"]
            names += [f"self_attn.{part}_proj.bias" for part in "qkv"] if kind.qkv_bias else []
            names += ["self_attn.o_proj.bias"] if kind.o_bias else []
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if kind.qk_norm_eps else []
            names += [f"{part}.bias" for part in PARTS[2:]] if config.mlp_bias else []
            for name in names:
                yield Weight(theirs=f"model.layers.{index}.{name}", ours=(f"layers.{index}.{name}",))

    def known_as(self, name: str) -> str | None:
        """Old files keep the angles of every layer."""
        return None if name.endswith("rotary_emb.inv_freq") else name


def _plain(config: GPTConfig, architecture: str) -> GroupedConfig:
    """The first layer's attention, after refusing what no class of this kind can say."""
    first = config.attention[0]
    refused = {
        "attention": not all(isinstance(layer, GroupedConfig) for layer in config.attention),
        "norm": config.norm != "rmsnorm",
        "mlp": config.mlp != "swiglu",
        "learned_positions": config.learned_positions,
        "scales": config.scaled,
    }
    if isinstance(first, GroupedConfig):
        refused |= {
            "rope": first.rope is None or first.rope.layout != "half-split",
            "head_map": first.head_map != "contiguous" and 1 < first.n_kv_head < first.n_query_head,
            "score": first.score.n_parameters(1, 1) > 0,
            "tie_kv": first.tie_kv,
            "v_head_dim": first.v_head_dim != first.head_dim,
        }
        refused["layers, which differ,"] = (
            len({replace(layer, window=None) for layer in config.attention}) > 1
        )
    refuse(refused, architecture)
    assert isinstance(first, GroupedConfig)
    return first


class Llama(LlamaLike):
    """Llama 2 and 3, SmolLM, and others of their shape."""

    architecture = "LlamaForCausalLM"

    def layers(self, fields: Fields, common: Table, eps: float, n_layer: int) -> list[GroupedConfig]:
        """All alike."""
        bias = fields.take("attention_bias", bool, False)
        fields.expect("rope_interleaved", False)
        return [GroupedConfig(**common, qkv_bias=bias, o_bias=bias)] * n_layer

    def said(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Biases, all or none."""
        refuse(
            {
                "window": any(layer.window for layer in config.attention),
                "qk_norm_eps": first.qk_norm_eps is not None,
                "qkv_bias without o_bias": first.qkv_bias != first.o_bias,
                "n_embd, no multiple of n_query_head,": config.n_embd % first.n_query_head != 0,
            },
            self.architecture,
        )
        return {"attention_bias": first.qkv_bias, "mlp_bias": config.mlp_bias}


class Mistral(LlamaLike):
    """A sliding window in every layer, or none."""

    architecture = "MistralForCausalLM"

    def layers(self, fields: Fields, common: Table, eps: float, n_layer: int) -> list[GroupedConfig]:
        """All alike."""
        window = fields.take("sliding_window", int, None if fields.has("sliding_window") else WINDOW)
        return [GroupedConfig(**common, window=window)] * n_layer

    def said(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """The window."""
        refuse(
            {
                "windows, which differ,": len({layer.window for layer in config.attention}) > 1,
                "qk_norm_eps": first.qk_norm_eps is not None,
                "bias": first.qkv_bias or first.o_bias or config.mlp_bias,
            },
            self.architecture,
        )
        return {"sliding_window": first.window}


class Qwen2(LlamaLike):
    """Biases on queries, keys and values; windows in the later layers, if any."""

    architecture = "Qwen2ForCausalLM"

    def layers(self, fields: Fields, common: Table, eps: float, n_layer: int) -> list[GroupedConfig]:
        """With a window or not, layer by layer."""
        kind = GroupedConfig(**common, **self.extras(fields, eps))
        window = fields.take("sliding_window", int, None if fields.has("sliding_window") else WINDOW)
        if not fields.take("use_sliding_window", bool, False):
            window = None
        types = fields.take("layer_types", list, None)
        if types is None:
            full = fields.take("max_window_layers", int, 28)
            types = ["full_attention" if index < full else "sliding_attention" for index in range(n_layer)]
        if len(types) != n_layer or not set(types) <= {"full_attention", "sliding_attention"}:
            raise InvalidInput(
                f"{fields.where}: layer_types={types!r:.80}: expected {n_layer} full or sliding ones."
            )
        return [replace(kind, window=window if name == "sliding_attention" else None) for name in types]

    def extras(self, fields: Fields, eps: float) -> Table:
        """Biases on three of the four projections."""
        return {"qkv_bias": True}

    def said(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Which layers have the window."""
        windows = {layer.window for layer in config.attention} - {None}
        refuse(
            {
                "windows, which differ,": len(windows) > 1,
                "mlp_bias": config.mlp_bias,
                **self.cannot(config, first),
            },
            self.architecture,
        )
        types = ["sliding_attention" if layer.window else "full_attention" for layer in config.attention]
        return {
            "use_sliding_window": bool(windows),
            "sliding_window": next(iter(windows), None),
            "max_window_layers": 0 if windows else config.n_layer,
            "layer_types": types,
        }

    def cannot(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Fields that only this one cannot say."""
        return {
            "qk_norm_eps": first.qk_norm_eps is not None,
            "bias": not first.qkv_bias or first.o_bias,
            "head_dim": first.head_dim * first.n_query_head != config.n_embd,
        }


class Qwen3(Qwen2):
    """Norms on queries and keys; biases on all four projections or on none."""

    architecture = "Qwen3ForCausalLM"

    def extras(self, fields: Fields, eps: float) -> Table:
        """Norms with the model's eps."""
        bias = fields.take("attention_bias", bool, False)
        return {"qkv_bias": bias, "o_bias": bias, "qk_norm_eps": eps}

    def cannot(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Fields that only this one cannot say."""
        return {
            "qk_norm_eps": first.qk_norm_eps != config.norm_eps,
            "qkv_bias without o_bias": first.qkv_bias != first.o_bias,
        }

    def said(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Which layers have the window, and biases."""
        return {**super().said(config, first), "attention_bias": first.qkv_bias}


for name, kind in (("llama", Llama), ("mistral", Mistral), ("qwen2", Qwen2), ("qwen3", Qwen3)):
    families.add(name)(kind())
