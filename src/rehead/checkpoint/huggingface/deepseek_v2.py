"""DeepSeek-V2 without experts."""

from typing import Any

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families, refuse
from rehead.checkpoint.huggingface.mla import LatentLike, require_dense
from rehead.config import GPTConfig


class DeepseekV2(LatentLike):
    """Its rotary part is interleaved, and its width is a multiple of its heads'."""

    architecture = "DeepseekV2ForCausalLM"
    deepseek_kernels = True

    def layout(self, fields: Fields) -> Layout:
        """The one it has."""
        return "interleaved"

    def own(self, fields: Fields, n_layer: int, width: int) -> dict[str, Any]:
        """No experts."""
        require_dense(fields, n_layer, 0)
        return {}

    def said(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Experts that no layer has."""
        assert first.rope is not None
        refuse(
            {
                "rope_layout=half-split": first.rope.layout != "interleaved",
                "n_embd, no multiple of n_query_head,": config.n_embd % first.n_query_head > 0,
                "scales": config.scaled,
            },
            self.architecture,
        )
        return {
            "first_k_dense_replace": config.n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "mlp_bias": False,
        }


families.add("deepseek_v2")(DeepseekV2())
