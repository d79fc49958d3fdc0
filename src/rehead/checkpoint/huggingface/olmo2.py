"""OLMo2: norms of what attention and MLP add, and one over all queries and one over all keys."""

from typing import ClassVar

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.llama import LlamaLike
from rehead.config import GPTConfig


class Olmo2(LlamaLike):
    """No window; biases on all four projections or on none."""

    architecture = "Olmo2ForCausalLM"
    norm_eps = 1e-5
    block: ClassVar[Table] = {"norm_position": "post"}
    names: ClassVar[dict[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    reads = ("qk_norm",)

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return biases, and norms with the model's eps."""
        bias = fields.take("attention_bias", bool, False)
        norm = {"qk_norm_eps": sizes.norm_eps, "qk_norm_over": "projection"}
        return {"qkv_bias": bias, "o_bias": bias, **norm}

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return no biases in the MLP."""
        return {"mlp_bias": False}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also windows, other norms of queries and keys, some biases without others."""
        return super().unsupported(config, first) | {
            "window": any(layer.window for layer in config.attention),
            "qk_norm": (first.qk_norm_eps, first.qk_norm, first.qk_norm_over)
            != (config.norm_eps, "rmsnorm", "projection"),
            "qkv_bias without o_bias": first.qkv_bias != first.o_bias,
            "mlp_bias": config.mlp_bias,
            "head_dim": first.head_dim * first.n_query_head != config.n_embd,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the biases."""
        return {"attention_bias": first.qkv_bias}


families.add("olmo2")(Olmo2())
