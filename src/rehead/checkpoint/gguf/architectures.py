"""What a GGUF file says of a model of a stock family: its architecture, its keys and its tensors.

Keys and layouts are those of llama.cpp's own converter; names of tensors are from the tables of the package `gguf`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from rehead.attention import GroupedConfig, LatentConfig, RopeConfig
from rehead.attention.rope_scaling import LinearScaling, YarnScaling
from rehead.checkpoint.files.deferred import map_deferred
from rehead.checkpoint.gguf.names import FREQUENCIES
from rehead.checkpoint.huggingface.base import refuse
from rehead.config import GPTConfig
from rehead.registry import Registry

Keys = dict[str, Any]
BETAS = (32.0, 1.0)
"""YaRN's ramp, for which these architectures have no keys."""
WITHOUT_QUERY_RANK = (26, 27)
"""Numbers of layers with which llama.cpp takes a DeepSeek model for one whose queries have no latent."""


class Architecture(ABC):
    """How llama.cpp names and computes a family."""

    name: ClassVar[str]

    @abstractmethod
    def keys(self, config: GPTConfig) -> Keys:
        """Return the keys of the architecture, without its name in front. Raises ConfigError for what it lacks."""

    def tensors(self, name: str, weight: Tensor, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield what the file has of a weight of the stock class: pairs of stock names and tensors."""
        yield name, weight

    def computed(self, config: GPTConfig) -> dict[str, Tensor]:
        """Return tensors of the file that are computed, not learned, by their names in it."""
        return {}

    def refuse(self, fields: dict[str, bool]) -> None:
        """Raise ConfigError naming the fields whose value is True."""
        refuse(fields, f"llama.cpp's architecture {self.name}", "does not compute")


architectures: Registry[Architecture] = Registry("GGUF architecture")
"""Entries are registered under the name of the stock family."""


class GPT2(Architecture):
    """Learned positions; linear layers are stored upright, other than in the stock class."""

    name = "gpt2"

    def keys(self, config: GPTConfig) -> Keys:
        """Return the sizes and the eps of LayerNorm; llama.cpp computes the tanh form of gelu only."""
        self.refuse({"exact gelu": config.mlp == "gelu_erf"})
        return sizes(config) | {"attention.layer_norm_epsilon": config.norm_eps}

    def tensors(self, name: str, weight: Tensor, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight; those of linear layers are transposed."""
        linear = name.endswith(".weight") and ".c_" in name
        yield name, map_deferred(lambda upright: upright.mT, weight) if linear else weight


class RmsNormed(Architecture):
    """RMSNorm, a gated MLP, and rope over whole heads."""

    biases: ClassVar[tuple[bool, bool]] = (False, False)
    """Biases of queries, keys and values, and of the output, that the architecture has tensors for."""

    def keys(self, config: GPTConfig) -> Keys:
        """Return sizes, heads and rope."""
        first = config.attention[0]
        assert isinstance(first, GroupedConfig)
        assert first.rope is not None
        scaling = self.scaling(first.rope)
        kind = type(first.rope.scaling).__name__
        self.refuse(
            {
                "window": any(layer.window is not None for layer in config.attention),
                "qkv_bias": first.qkv_bias and not self.biases[0],
                "o_bias": first.o_bias and not self.biases[1],
                f"scaled rope ({kind})": scaling is None,
            }
        )
        return {
            **sizes(config),
            "attention.head_count_kv": first.n_kv_head,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.key_length": first.head_dim,
            "attention.value_length": first.head_dim,
            "rope.freq_base": first.rope.theta,
            "rope.dimension_count": first.head_dim,
            **(scaling or {}),
            "vocab_size": config.vocab_size,
        }

    def scaling(self, rope: RopeConfig) -> Keys | None:
        """Return the keys of the scaled angles that llama.cpp computes itself; None if it computes others."""
        if isinstance(rope.scaling, LinearScaling):
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.scaling.factor}
        return {} if rope.scaling is None else None


class Llama(RmsNormed):
    """Llama, whose heads llama.cpp rotates in pairs of neighbours."""

    name = "llama"
    biases = (True, True)

    def scaling(self, rope: RopeConfig) -> Keys | None:
        """Return the keys of linear scaling; for others, which are divisors, the factor of cosines unless it is 1."""
        if rope.scaling is None or rope.scaling.magnitude == 1:
            return super().scaling(rope) or {}
        return {"rope.scaling.attn_factor": rope.scaling.magnitude}

    def tensors(self, name: str, weight: Tensor, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight; rows of queries and keys in llama.cpp's order."""
        if ".q_proj." in name or ".k_proj." in name:
            first = config.attention[0]
            assert isinstance(first, GroupedConfig)
            weight = map_deferred(partial(neighbours, head_dim=first.head_dim), weight)
        yield name, weight

    def computed(self, config: GPTConfig) -> dict[str, Tensor]:
        """Return the divisors of the angles, if they are scaled one by one."""
        first = config.attention[0]
        assert isinstance(first, GroupedConfig)
        assert first.rope is not None
        if isinstance(first.rope.scaling, LinearScaling | None):
            return {}
        plain = RopeConfig(theta=first.rope.theta).frequencies(first.head_dim)
        return {FREQUENCIES: (plain / first.rope.frequencies(first.head_dim)).float()}


class Qwen2(RmsNormed):
    """Biases on queries, keys and values."""

    name = "qwen2"
    biases = (True, False)

    def scaling(self, rope: RopeConfig) -> Keys | None:
        """Return the keys of linear scaling or YaRN; llama.cpp multiplies attn_factor by the paper's magnitude."""
        yarn = rope.scaling
        if not isinstance(yarn, YarnScaling) or (yarn.beta_fast, yarn.beta_slow) != BETAS:
            return super().scaling(rope)
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn.factor,
            "rope.scaling.original_context_length": yarn.original_max_position_embeddings,
            "rope.scaling.attn_factor": yarn.magnitude / (1 + 0.1 * math.log(yarn.factor)),
        }


class Qwen3(Qwen2):
    """Norms on queries and keys, no biases."""

    name = "qwen3"
    biases = (False, False)


class DeepSeek(Architecture):
    """MLA as MQA over the latent: the up-projection is split in keys and values, and keys are transposed."""

    name = "deepseek2"

    def keys(self, config: GPTConfig) -> Keys:
        """Return sizes, latents and rope, and the keys of experts, which a dense file needs too."""
        first = config.attention[0]
        assert isinstance(first, LatentConfig)
        assert first.rope is not None
        rank = first.q_lora_rank or 0
        few = config.n_layer in WITHOUT_QUERY_RANK or (config.n_layer == 48 and config.vocab_size == 128_256)
        self.refuse(
            {
                "experts": config.experts is not None,
                "scaled rope": first.rope.scaling is not None,
                "rope_layout=half-split": first.rope.layout != "interleaved",
                f"q_lora_rank={rank} with {config.n_layer} layers": rank > 0 and few,
            }
        )
        return sizes(config) | {
            "attention.head_count_kv": 1,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.q_lora_rank": rank,
            "attention.kv_lora_rank": first.kv_lora_rank,
            "attention.key_length": first.kv_lora_rank + first.qk_rope_head_dim,
            "attention.value_length": first.kv_lora_rank,
            "attention.key_length_mla": first.qk_nope_head_dim + first.qk_rope_head_dim,
            "attention.value_length_mla": first.v_head_dim,
            "rope.freq_base": first.rope.theta,
            "rope.dimension_count": first.qk_rope_head_dim,
            "leading_dense_block_count": config.n_layer,
            "expert_feed_forward_length": config.n_hidden,
            "expert_shared_count": 0,
            "vocab_size": config.vocab_size,
        }

    def tensors(self, name: str, weight: Tensor, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
        """Yield the weight, or the two parts of an up-projection."""
        first = config.attention[0]
        assert isinstance(first, LatentConfig)
        if ".kv_b_proj." not in name:
            yield name, weight
            return
        sizes_of = (first.qk_nope_head_dim, first.v_head_dim)
        yield name.replace("kv_b", "k_b"), map_deferred(partial(_keys, sizes_of=sizes_of), weight)
        yield name.replace("kv_b", "v_b"), map_deferred(partial(_values, sizes_of=sizes_of), weight)


def sizes(config: GPTConfig) -> Keys:
    """Return the keys that all architectures have."""
    first = config.attention[0]
    assert isinstance(first, GroupedConfig | LatentConfig)
    return {
        "block_count": config.n_layer,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.n_hidden,
        "attention.head_count": first.n_query_head,
    }


def neighbours(rows: Tensor, head_dim: int) -> Tensor:
    """Permute the rows of each query or key head from pairs (i, i + E/2) to llama.cpp's (2i, 2i + 1)."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(rows.shape)


def _keys(weight: Tensor, sizes_of: tuple[int, int]) -> Tensor:
    return weight.unflatten(0, (-1, sum(sizes_of)))[:, : sizes_of[0]].mT


def _values(weight: Tensor, sizes_of: tuple[int, int]) -> Tensor:
    return weight.unflatten(0, (-1, sum(sizes_of)))[:, sizes_of[0] :]


for family, kind in (("gpt2", GPT2), ("llama", Llama), ("qwen2", Qwen2), ("qwen3", Qwen3)):
    architectures.add(family)(kind())
for family in ("deepseek_v3", "deepseek_v2"):
    architectures.add(family)(DeepSeek())
