"""DeepSeek-V3 without experts: `first_k_dense_replace` is the number of layers."""

from typing import Any

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families, refuse
from rehead.checkpoint.huggingface.mla import LatentLike, interleaved_or_not, require_dense
from rehead.config import GPTConfig


class DeepseekV3(LatentLike):
    """Every engine's MLA."""

    architecture = "DeepseekV3ForCausalLM"
    deepseek_kernels = True

    def layout(self, fields: Fields) -> Layout:
        """Either."""
        return interleaved_or_not(fields)

    def own(self, fields: Fields, n_layer: int, width: int) -> dict[str, Any]:
        """No experts."""
        require_dense(fields, n_layer, 3)
        return {}

    def said(self, config: GPTConfig, first: LatentConfig) -> Table:
        """The layout, and experts that no layer has."""
        refuse({"scales": config.scaled}, self.architecture)
        assert first.rope is not None
        return {
            "rope_interleave": first.rope.layout == "interleaved",
            "first_k_dense_replace": config.n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }


families.add("deepseek_v3")(DeepseekV3())
