"""Llama and the families that share its names: Mistral, Qwen2 and Qwen3."""

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
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


class Windows(Enum):
    """Which layers of a family may have a window."""

    NONE = "none"
    ALIKE = "all, with the same, or none"
    SOME = "some, with the same"

    def allow(self, windows: set[int | None]) -> bool:
        """Whether a model may have these."""
        if self is Windows.NONE:
            return windows == {None}
        return len(windows - {None} if self is Windows.SOME else windows) <= 1


class LlamaLike(Decoder[GroupedConfig]):
    """MHA, GQA or MQA with rope; the families differ in biases, norms, windows and what else their files say."""

    attention = GroupedConfig
    attention_words = "attention"
    differ: ClassVar[tuple[str, ...]] = ("window",)
    """Fields of the attention in which layers may differ."""
    heads: ClassVar[dict[str, int]] = {}
    """Defaults of missing keys, where they do not follow from other sizes."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Entries of `unsupported`, not all of them of the attention, that this family can represent or checks itself."""
    any_head_dim: ClassVar[bool] = True
    """Whether `head_dim` may differ from the model's width divided by the number of query heads."""
    windows: ClassVar[Windows] = Windows.NONE
    biases: ClassVar[tuple[tuple[bool, bool], ...]] = ((False, False), (True, True))
    """`qkv_bias` and `o_bias`: the ways a model may have them, of which `attention_bias` in config.json chooses."""
    biased: ClassVar[bool] = False
    """The default of `attention_bias`."""
    mlp_biased: ClassVar[bool] = False
    """Whether the MLP may have biases, as `mlp_bias` in config.json says."""
    qk_norm: ClassVar[tuple[str, str] | None] = None
    """`qk_norm` and `qk_norm_over` of norms on queries and keys, which have the model's eps; None for no norms."""

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, all alike."""
        kind = GroupedConfig(
            **shared,
            n_kv_head=self.take_size(fields, "num_key_value_heads", sizes.n_query_head),
            head_dim=self.take_size(fields, "head_dim", sizes.head_dim),
            **self._biases(fields),
            **self._norms(sizes.norm_eps),
            **self.attention_fields(fields, sizes),
        )
        return [kind] * sizes.n_layer

    def take_size(self, fields: Fields, name: str, derived: int) -> int:
        """Return a size of the heads; null means the one that follows from other sizes."""
        size: int = fields.take(name, int, self.heads.get(name, derived), null=derived)
        return size

    def _biases(self, fields: Fields) -> Table:
        several = len(self.biases) > 1
        qkv, output = self.biases[fields.take("attention_bias", bool, self.biased) if several else 0]
        return {"qkv_bias": qkv, "o_bias": output}

    def _norms(self, eps: float) -> Table:
        if self.qk_norm is None:
            return {}
        kind, over = self.qk_norm
        return {"qk_norm_eps": eps, "qk_norm": kind, "qk_norm_over": over}

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return further fields of the attention."""
        return {}

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return whether the MLP has biases."""
        return {"mlp_bias": fields.take("mlp_bias", bool, False) if self.mlp_biased else False}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name what no class of this kind can represent, unless it is among `reads`."""
        ropes = [layer.rope for layer in config.attention]
        whole = [rope.partial_rotary_factor == 1 for rope in ropes if rope is not None]
        alike: dict[str, Any] = dict.fromkeys(self.differ)
        plain = [replace(layer, **alike) for layer in config.attention]
        windows = "window" if self.windows is Windows.NONE else "different windows"
        biases = first.qkv_bias, first.o_bias
        norms, eps = (first.qk_norm, first.qk_norm_over), (first.qk_norm_eps, config.norm_eps)
        beside = "" if not self.qk_norm or eps[0] is None else "={:g} beside norm_eps={:g}".format(*eps)
        refused = {
            "scales": config.scaled,
            "mlp_bias": config.mlp_bias and not self.mlp_biased,
            windows: not self.windows.allow({layer.window for layer in config.attention}),
            "rope": any(rope is None for rope in ropes),
            "rope_layout": any(rope is not None and rope.layout != self.rope.layout for rope in ropes),
            "partial_rotary_factor": self.rope.partial is None and not all(whole),
            "head_map": first.head_map != "contiguous" and 1 < first.n_kv_head < first.n_query_head,
            "score": first.score != ScaledDot(),
            "tie_kv": first.tie_kv,
            "head_dim": not self.any_head_dim and first.head_dim * first.n_query_head != config.n_embd,
            "v_head_dim": first.v_head_dim != first.head_dim,
            "qkv_bias={} with o_bias={}".format(*biases): biases not in self.biases,
            f"qk_norm_eps{beside}": eps[0] != (eps[1] if self.qk_norm else None),
            "qk_norm": self.qk_norm is not None and norms != self.qk_norm,
            different(plain): len(set(plain)) > 1,
        }
        return {name: bad for name, bad in refused.items() if name not in self.reads}

    def attention_json(self, first: GroupedConfig) -> Table:
        """Return the number of KV heads, and the width of all heads."""
        return {"num_key_value_heads": first.n_kv_head, "head_dim": first.head_dim}

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the biases."""
        biases = {"attention_bias": first.qkv_bias} if len(self.biases) > 1 else {}
        return biases | ({"mlp_bias": config.mlp_bias} if self.mlp_biased else {})

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
    sizes: ClassVar[dict[str, int]] = {"max_position_embeddings": 2048}  # left out by Llama 1
    mlp_biased = True

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return none, but refuse the other layout of rope."""
        fields.expect("rope_interleaved", False)
        return {}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also widths that the heads do not divide."""
        return super().unsupported(config, first) | {
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head != 0,
        }


class Mistral(LlamaLike):
    """A sliding window in every layer, or none."""

    architecture = "MistralForCausalLM"
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 8}
    windows = Windows.ALIKE
    biases = ((False, False),)

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the window."""
        return {"window": window_of(fields)}

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
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 32}
    windows = Windows.SOME
    biases: ClassVar[tuple[tuple[bool, bool], ...]] = ((True, False),)
    any_head_dim = False

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, with a window or without."""
        layers, window = super().layers(fields, sizes, shared), window_of(fields)
        if not fields.take("use_sliding_window", bool, False):
            window = None
        full = fields.take("max_window_layers", int, 28)
        slides = which_slide(fields, [index >= full for index in range(len(layers))])
        return windowed(layers, slides, window)

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return which layers have the window; for releases without `layer_types`, from which on."""
        words, slides = window_words(config), [layer.window is not None for layer in config.attention]
        start = slides.index(True) if any(slides) else config.n_layer
        return super().extra_json(config, first) | {
            "use_sliding_window": any(slides),
            "max_window_layers": start if all(slides[start:]) else 0,
            **words,
        }


class Qwen3(Qwen2):
    """Norms on queries and keys; biases on all four projections or on none."""

    architecture = "Qwen3ForCausalLM"
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 32, "head_dim": 128}
    biases = LlamaLike.biases
    qk_norm = ("rmsnorm", "head")
    any_head_dim = True


for name, kind in (("llama", Llama), ("mistral", Mistral), ("qwen2", Qwen2), ("qwen3", Qwen3)):
    families.add(name)(kind())
