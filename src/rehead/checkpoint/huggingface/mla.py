"""What the families with multi-head latent attention share; each has a file of its own."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
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


class LatentLike(Family):
    """A decoupled rotary part, an RMSNorm on the latent, SwiGLU, no biases; every layer dense and alike.

    What differs: what config.json means where it is silent, how the rotary part is laid out, experts
    that must not be there, and what MiniCPM multiplies with.
    """

    tied: ClassVar[bool] = False
    norm_eps: ClassVar[float] = 1e-6

    def read(self, fields: Fields) -> GPTConfig:
        """The config that a config.json describes."""
        n_layer, width = fields.take("num_hidden_layers", int), fields.take("hidden_size", int)
        heads = fields.take("num_attention_heads", int)
        fields.expect("num_key_value_heads", heads)
        fields.expect("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            fields.expect(name, False)
        length = fields.take("max_position_embeddings", int)
        rotated = fields.take("qk_rope_head_dim", int)
        if rotated < 1:
            raise InvalidInput(
                f"{fields.where}: qk_rope_head_dim={rotated}: this class rotates a part of its own."
            )
        fields.expect("head_dim", rotated)
        attention = LatentConfig(
            n_query_head=heads,
            kv_lora_rank=fields.take("kv_lora_rank", int),
            q_lora_rank=fields.take("q_lora_rank", int, None),
            qk_nope_head_dim=fields.take("qk_nope_head_dim", int),
            qk_rope_head_dim=rotated,
            v_head_dim=fields.take("v_head_dim", int, width // heads if heads > 0 else 0),
            rope=replace(fields.rope(length), layout=self.layout(fields)),
            attn_pdrop=fields.take("attention_dropout", float, 0.0),
        )
        config = GPTConfig(
            vocab_size=fields.take("vocab_size", int),
            block_size=length,
            n_embd=width,
            attention=(attention,) * n_layer,
            learned_positions=False,
            norm="rmsnorm",
            norm_eps=fields.take("rms_norm_eps", float, self.norm_eps),
            mlp="swiglu",
            n_hidden=fields.take("intermediate_size", int),
            mlp_bias=False,
            tie_embeddings=fields.take("tie_word_embeddings", bool, self.tied),
            **self.own(fields, n_layer, width),
        )
        fields.finish()
        return config

    @abstractmethod
    def layout(self, fields: Fields) -> Layout:
        """Which numbers of the rotary part form a pair."""

    def own(self, fields: Fields, n_layer: int, width: int) -> dict[str, Any]:
        """Fields of GPTConfig that only this family has; refuses what is no dense model."""
        return {}

    def write(self, config: GPTConfig) -> Table:
        """The config.json of a model. `rms_norm_eps` is of the residual stream; the latent norm's is fixed."""
        first = config.attention[0]
        refused = {
            "attention (it has mla)": not all(isinstance(layer, LatentConfig) for layer in config.attention),
            "layers, which differ,": len(set(config.attention)) > 1,
            "norm": config.norm != "rmsnorm",
            "mlp": config.mlp != "swiglu" or config.mlp_bias,
            "learned_positions": config.learned_positions,
        }
        if isinstance(first, LatentConfig):
            refused |= {
                "latent_norm=False": not first.latent_norm,
                "rebuilt keys or missing rotary part": not first.qk_rope_head_dim,
                "window": first.window is not None,
                "n_kv_head": first.n_kv_head != first.n_query_head,
                "bias": first.qkv_bias or first.o_bias,
            }
        refuse(refused, self.architecture)
        assert isinstance(first, LatentConfig)
        return {
            "architectures": [self.architecture],
            "model_type": families.name_of(self),
            "vocab_size": config.vocab_size,
            "hidden_size": config.n_embd,
            "intermediate_size": config.n_hidden,
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": first.n_query_head,
            "num_key_value_heads": first.n_query_head,
            "kv_lora_rank": first.kv_lora_rank,
            "q_lora_rank": first.q_lora_rank,
            "qk_nope_head_dim": first.qk_nope_head_dim,
            "qk_rope_head_dim": first.qk_rope_head_dim,
            "v_head_dim": first.v_head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.block_size,
            "rms_norm_eps": config.norm_eps,
            **write_rope(first.rope, config.block_size),
            "attention_bias": False,
            "attention_dropout": first.attn_pdrop,
            "tie_word_embeddings": config.tie_embeddings,
            **self.said(config, first),
        }

    @abstractmethod
    def said(self, config: GPTConfig, first: LatentConfig) -> Table:
        """What this family has fields of its own for; refuses the rest."""

    def weights(self, config: GPTConfig) -> Iterator[Weight]:
        """Names are ours with `model.` before them."""
        yield from outside_layers(config)
        for index, kind in enumerate(config.attention):
            assert isinstance(kind, LatentConfig)
            queries = ("q_proj",) if kind.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
            parts = (*queries, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
            for name in (*PARTS, *(f"self_attn.{part}" for part in parts)):
                yield Weight(
                    theirs=f"model.layers.{index}.{name}.weight", ours=(f"layers.{index}.{name}.weight",)
                )


def interleaved_or_not(fields: Fields) -> Layout:
    """`rope_interleave`, true where it is not named."""
    return "interleaved" if fields.take("rope_interleave", bool, True) else "half-split"


def require_dense(fields: Fields, n_layer: int, default: int) -> None:
    """Refuse a model of which some layers have experts."""
    dense = fields.take("first_k_dense_replace", int, default)
    if dense < n_layer:
        raise InvalidInput(
            f"{fields.where}: first_k_dense_replace={dense} of {n_layer} layers: rehead has no experts."
        )
