"""OLMo2: norms of what attention and MLP add, and one over all queries and one over all keys."""

from typing import ClassVar

from rehead.checkpoint.huggingface.base import Table, families
from rehead.checkpoint.huggingface.llama import LlamaLike


class Olmo2(LlamaLike):
    """No window; biases on all four projections or on none."""

    architecture = "Olmo2ForCausalLM"
    norm_eps = 1e-5
    block: ClassVar[Table] = {"norm_position": "post"}
    names: ClassVar[dict[str, str]] = {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
    any_head_dim = False
    qk_norm = ("rmsnorm", "projection")


families.add("olmo2")(Olmo2())
