"""DeepSeek-V2 and V2-Lite: MLA, and experts in the layers after the first ones."""

from rehead.attention import LatentConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.experts import read_deepseek, unsayable, write_deepseek
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.config import GPTConfig

EXPERTS: Table = {
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "alias": "num_experts",
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
}
"""The class's defaults of missing keys in config.json."""
GREEDY, OF_GROUPS = "greedy", "group_limited_greedy"


class DeepseekV2(LatentLike):
    """MLA whose rotary part is interleaved; the model width is a multiple of the number of heads."""

    architecture = "DeepseekV2ForCausalLM"
    deepseek_kernels = True
    says = ("experts",)
    layouts = ("interleaved",)

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the fields of all MLA families, and the experts.

        `norm_topk_prob` is refused: DeepSeek's own code divides the weights by their sum, and transformers' does not.
        """
        fields.expect("scoring_func", "softmax")
        fields.expect("norm_topk_prob", False)
        method = fields.expect("topk_method", GREEDY, OF_GROUPS)
        given = {name: fields.take(name, int, None) for name in ("n_group", "topk_group")}
        groups = {name: given[name] or 0 for name in given} if method == OF_GROUPS else {}
        experts = read_deepseek(fields, sizes.n_layer, EXPERTS, **groups)
        return super().extra_config(fields, sizes) | experts

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name some widths and other experts, too."""
        experts = config.experts
        return super().unsupported(config, first) | {
            **unsayable(experts, config.n_layer, "softmax"),
            "norm_topk_prob": experts is not None and experts.norm_topk_prob,
            "n_embd, not a multiple of n_query_head,": config.n_embd % first.n_query_head > 0,
        }

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the keys of experts."""
        table = super().extra_json(config, first) | write_deepseek(config.experts, config.n_layer)
        table["mlp_bias"] = False
        if config.experts is not None:
            n_group, topk_group = config.experts.n_group, config.experts.topk_group
            method = GREEDY if n_group == 1 else OF_GROUPS
            table |= {"topk_method": method, "n_group": n_group, "topk_group": topk_group}
        return table


families.add("deepseek_v2")(DeepseekV2())
