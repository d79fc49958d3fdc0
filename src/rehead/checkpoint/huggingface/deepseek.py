"""DeepSeek-V3 without experts: `first_k_dense_replace` is the number of layers."""

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.mla import LatentLike, has_layout, interleaved_or_not, require_dense
from rehead.config import GPTConfig


class DeepseekV3(LatentLike):
    """The class for which engines have MLA kernels."""

    architecture = "DeepseekV3ForCausalLM"
    deepseek_kernels = True

    def layout(self, fields: Fields) -> Layout:
        """Return the layout that config.json names."""
        return interleaved_or_not(fields)

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the fields of all MLA families; refuse experts."""
        require_dense(fields, sizes.n_layer, 3)
        return super().extra_config(fields, sizes)

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name what this class cannot represent: scales too."""
        return super().unsupported(config, first) | {"scales": config.scaled}

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the layout and the keys of experts, with `first_k_dense_replace` such that no layer has any."""
        return super().extra_json(config, first) | {
            "rope_interleave": has_layout(first, "interleaved"),
            "first_k_dense_replace": config.n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
        }


families.add("deepseek_v3")(DeepseekV3())
