"""The experts of a model: how many, of which layers, and how the router chooses among them."""

import math
from dataclasses import dataclass
from typing import Literal

from rehead.errors import ConfigError
from rehead.fields import require_types

MOST_EXPERTS = 1 << 16
"""Of all layers together; a config.json with more is refused: building it would take hours."""
SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group")


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of one MLP (Shazeer et al., arXiv 1701.06538), in DeepSeek's words.

    Each of `layers` has `n_routed_experts` MLPs, `moe_intermediate_size` wide; a token's output is the weighted sum of
    the outputs of `num_experts_per_tok` of them. The router scores all by softmax (Qwen3-MoE, DeepSeek-V2) or by
    sigmoid; with sigmoid it chooses by the score plus a learned bias (DeepSeek-V3, arXiv 2412.19437). The experts are
    in `n_group` groups, and only those of the best `topk_group` can be chosen: best by the highest score or, with
    sigmoid, by the sum of the two highest. The weights are the scores, with `norm_topk_prob` divided by their sum,
    times `routed_scaling_factor`. Every token also passes through the shared experts, which are one MLP,
    `n_shared_experts` times as wide.
    """

    layers: tuple[int, ...]
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1

    __no_type_check__ = True  # __post_init__ checks what is given

    def __post_init__(self) -> None:
        require_types(self)
        for name in SIZES:
            if not 1 <= getattr(self, name) <= MOST_EXPERTS:
                raise ConfigError(f"{name}={getattr(self, name)!s:.40}. Use 1 to {MOST_EXPERTS:,}.")
        if not 0 <= self.n_shared_experts <= MOST_EXPERTS:
            raise ConfigError(f"n_shared_experts={self.n_shared_experts!s:.40}. Use 0 to {MOST_EXPERTS:,}.")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"layers={self.layers!s:.60} with experts: list each of them once, in order.")
        if len(self.layers) * self.n_routed_experts > MOST_EXPERTS:
            raise ConfigError(
                f"{len(self.layers)} layers of n_routed_experts={self.n_routed_experts} are too many. Use at most "
                f"{MOST_EXPERTS:,} together."
            )
        if not 0 < self.routed_scaling_factor < math.inf:
            raise ConfigError(
                f"routed_scaling_factor={self.routed_scaling_factor} is not a positive number. Use 1 for no scaling."
            )
        if self.n_routed_experts % self.n_group or self.topk_group > self.n_group:
            raise ConfigError(
                f"topk_group={self.topk_group} of n_group={self.n_group} groups of n_routed_experts="
                f"{self.n_routed_experts}: groups are equally large, and no more are chosen than there are. Use "
                "n_group=1 and topk_group=1 for no groups."
            )
        least = 2 if self.scoring_func == "sigmoid" and self.n_group > 1 else 1
        if self.of_group < least:
            raise ConfigError(
                f"n_group={self.n_group} of n_routed_experts={self.n_routed_experts} with scoring_func=sigmoid: a "
                "group is judged by its two best. Use fewer groups."
            )
        if self.num_experts_per_tok > self.topk_group * self.of_group:
            raise ConfigError(
                f"num_experts_per_tok={self.num_experts_per_tok}: the router chooses among "
                f"{self.topk_group * self.of_group} experts. Use at most as many."
            )

    @property
    def of_group(self) -> int:
        """Return the number of experts in a group."""
        return self.n_routed_experts // self.n_group

    @property
    def has_correction(self) -> bool:
        """Return True if the router has a bias that only chooses, and does not weigh."""
        return self.scoring_func == "sigmoid"
