"""GLM and GLM-4: interleaved rope in half of each head, gate and up in one tensor; GLM-4 norms what is added, too."""

from typing import ClassVar

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.llama import LlamaLike
from rehead.checkpoint.huggingface.rope import RopeKeys
from rehead.config import GPTConfig


class Glm(LlamaLike):
    """No window; biases on queries, keys and values, or none."""

    architecture = "GlmForCausalLM"
    norm_eps = 0.00000015625
    rope = RopeKeys(partial=0.5, layout="interleaved")
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 2, "head_dim": 128}
    names: ClassVar[dict[str, str]] = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}

    def attention_fields(self, fields: Fields, sizes: Sizes) -> Table:
        """Return biases on three of the four projections."""
        return {"qkv_bias": fields.take("attention_bias", bool, True)}

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return no biases in the MLP."""
        return {"mlp_bias": False}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also windows, norms in the heads, other biases."""
        return super().unsupported(config, first) | {
            "window": any(layer.window for layer in config.attention),
            "qk_norm_eps": first.qk_norm_eps is not None,
            "o_bias": first.o_bias,
            "mlp_bias": config.mlp_bias,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the biases."""
        return {"attention_bias": first.qkv_bias}


class Glm4(Glm):
    """GLM-4-0414: four norms in a layer."""

    architecture = "Glm4ForCausalLM"
    block: ClassVar[Table] = {"norm_position": "both"}


families.add("glm")(Glm())
families.add("glm4")(Glm4())
