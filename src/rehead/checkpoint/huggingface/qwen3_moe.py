"""Qwen3-MoE: Qwen3's attention, and experts in some layers or in all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rehead.attention import GroupedConfig
from rehead.checkpoint.huggingface.base import Fields, Table, families
from rehead.checkpoint.huggingface.decoder import Sizes
from rehead.checkpoint.huggingface.experts import take_number
from rehead.checkpoint.huggingface.llama import LlamaLike, Qwen3, Windows, window_of
from rehead.config import ExpertsConfig, GPTConfig
from rehead.errors import InvalidInput


class Qwen3Moe(Qwen3):
    """A softmax over all experts, none of them shared; a window, if there is one, in every layer."""

    architecture = "Qwen3MoeForCausalLM"
    says = ("experts",)
    windows = Windows.ALIKE
    heads: ClassVar[dict[str, int]] = {"num_key_value_heads": 4}

    def layers(self, fields: Fields, sizes: Sizes, shared: Table) -> Sequence[GroupedConfig]:
        """Return the attention of every layer, all alike."""
        window = window_of(fields)
        if not fields.take("use_sliding_window", bool, False):
            window = None
        layers = LlamaLike.layers(self, fields, sizes, shared)
        return [replace(layer, window=window) for layer in layers]

    def extra_config(self, fields: Fields, sizes: Sizes) -> Table:
        """Return the experts."""
        n_expert = take_number(fields, 128, "num_experts", "num_local_experts")
        every, dense = fields.take("decoder_sparse_step", int, 1), fields.take("mlp_only_layers", list, [])
        if every < 1:
            raise InvalidInput(f"{fields.where}: decoder_sparse_step={every}. Use 1 or more.")
        if not all(type(index) is int and 0 <= index < sizes.n_layer for index in dense):
            raise InvalidInput(
                f"{fields.where}: mlp_only_layers={dense!r:.80}: expected a list of layers from 0 to "
                f"{sizes.n_layer - 1}."
            )
        mixed = [i for i in range(sizes.n_layer) if i not in dense and (i + 1) % every == 0 and n_expert != 0]
        more = {
            "num_experts_per_tok": fields.take("num_experts_per_tok", int, 8),
            "moe_intermediate_size": fields.take("moe_intermediate_size", int, 768),
            "norm_topk_prob": fields.take("norm_topk_prob", bool, False),
        }
        experts = ExpertsConfig(layers=tuple(mixed), n_routed_experts=n_expert, **more) if mixed else None
        return super().extra_config(fields, sizes) | {"experts": experts}

    def unsupported(self, config: GPTConfig, first: GroupedConfig) -> dict[str, bool]:
        """Name also MLPs without experts, and other experts."""
        experts = config.experts
        return super().unsupported(config, first) | {
            "layers without experts, all of them,": experts is None,
            "experts, chosen in another way,": experts is not None
            and (experts.has_correction or experts.n_group > 1 or experts.routed_scaling_factor != 1),
            "shared experts": experts is not None and experts.n_shared_experts > 0,
        }

    def extra_json(self, config: GPTConfig, first: GroupedConfig) -> Table:
        """Return the window, biases and the experts."""
        experts = config.experts
        assert experts is not None
        return LlamaLike.extra_json(self, config, first) | {
            "use_sliding_window": first.window is not None,
            "sliding_window": first.window,
            "num_experts": experts.n_routed_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "moe_intermediate_size": experts.moe_intermediate_size,
            "norm_topk_prob": experts.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [index for index in range(config.n_layer) if index not in experts.layers],
        }


families.add("qwen3_moe")(Qwen3Moe())
