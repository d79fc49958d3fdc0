"""DeepSeek-V3: MLA, and experts in the layers after the first ones."""

from rehead.attention import LatentConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.experts import read_deepseek, unsayable, write_deepseek
from rehead.checkpoint.huggingface.mla import LatentLike
from rehead.config import GPTConfig

EXPERTS: Table = {
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "alias": "num_local_experts",
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
}
"""The class's defaults of missing keys in config.json."""


class DeepseekV3(LatentLike):
    """The class for which engines have MLA kernels."""

    architecture = "DeepseekV3ForCausalLM"
    deepseek_kernels = True
    says = ("experts",)

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the fields of all MLA families, and the experts."""
        fields.expect("scoring_func", "sigmoid")
        fields.expect("topk_method", "noaux_tc")
        router = {
            "scoring_func": "sigmoid",
            "norm_topk_prob": fields.take("norm_topk_prob", bool, True),
            "n_group": fields.take("n_group", int, 8),
            "topk_group": fields.take("topk_group", int, 4),
        }
        experts = read_deepseek(fields, sizes.n_layer, EXPERTS, **router)
        return super().extra_config(fields, sizes) | experts

    def unsupported(self, config: GPTConfig, first: LatentConfig) -> dict[str, bool]:
        """Name other experts too."""
        return super().unsupported(config, first) | unsayable(config.experts, config.n_layer, "sigmoid")

    def extra_json(self, config: GPTConfig, first: LatentConfig) -> Table:
        """Return the keys of experts, too."""
        experts = config.experts
        return super().extra_json(config, first) | {
            **write_deepseek(experts, config.n_layer),
            **({} if experts is None else {"topk_method": "noaux_tc"}),
            "n_group": 1 if experts is None else experts.n_group,
            "topk_group": 1 if experts is None else experts.topk_group,
            "num_nextn_predict_layers": 0,
        }


families.add("deepseek_v3")(DeepseekV3())
