"""GLM and GLM-4: interleaved rope in half of each head, gate and up in one tensor; GLM-4 norms what is added, too."""

from typing import ClassVar

from rehead.checkpoint.huggingface.base import Table, families
from rehead.checkpoint.huggingface.llama import LlamaLike
from rehead.checkpoint.huggingface.rope import RopeKeys


class Glm(LlamaLike):
    """No window; biases on queries, keys and values, or none."""

    architecture = "GlmForCausalLM"
    norm_eps = 0.00000015625
    rope = RopeKeys(partial=0.5, layout="interleaved")
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 2, "head_dim": 128}
    names: ClassVar[dict[str, str]] = {"mlp.gate_proj": "mlp.gate_up_proj", "mlp.up_proj": "mlp.gate_up_proj"}
    biases = ((False, False), (True, False))
    biased = True


class Glm4(Glm):
    """GLM-4-0414: four norms in a layer."""

    architecture = "Glm4ForCausalLM"
    block: ClassVar[Table] = {"norm_position": "both"}


families.add("glm")(Glm())
families.add("glm4")(Glm4())
