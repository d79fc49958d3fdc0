"""DeepSeek-V2 without experts."""

from rehead.attention import LatentConfig
from rehead.attention.rope import Layout
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.mla import LatentLike, has_layout, require_dense
from rehead.config import GPTConfig


class DeepseekV2(LatentLike):
    """MLA whose rotary part is interleaved; the model width is a multiple of the number of heads."""

    architecture = "DeepseekV2ForCausalLM"
    deepseek_kernels = True

    def layout(self, fields: Fields) -> Layout:
        """Return interleaved, the only layout of this class."""
        return "interleaved"

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the fields of all MLA families; refuse experts."""
        require_dense(fields, sizes.n_layer, 0)
        return super().extra_config(fields, sizes)

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name what this class cannot represent: the other layout, some widths, and scales too."""
        return super().unsupported(config, first) | {
            "rope_layout=half-split": not has_layout(first, "interleaved"),
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head > 0,
            "scales": config.scaled,
        }

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the keys of experts, with `first_k_dense_replace` such that no layer has any."""
        return super().extra_json(config, first) | {
            "first_k_dense_replace": config.n_layer,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "mlp_bias": False,
        }


families.add("deepseek_v2")(DeepseekV2())
