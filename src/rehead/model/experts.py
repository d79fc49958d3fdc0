"""A mixture of experts in place of one MLP: a router chooses some of them for each token."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from rehead.config import ExpertsConfig, GPTConfig

TINY = 1e-20
"""Added to the sum that scores are divided by, as in DeepSeek-V3."""


class Router(nn.Module):
    """Chooses the experts of each token and their weights, in at least float32.

    `e_score_correction_bias` is DeepSeek-V3's, which balances the load of the experts: it changes which experts are
    chosen, but not their weights. It keeps its own dtype beside narrower weights: rounding would change the choice.
    """

    def __init__(self, width: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, width))
        nn.init.normal_(self.weight, std=0.02)
        self.e_score_correction_bias = (
            nn.Parameter(torch.zeros(config.n_routed_experts)) if config.has_correction else None
        )

    def forward(self, x: Float[Tensor, "T D"]) -> tuple[Float[Tensor, "T A"], Int[Tensor, "T A"]]:
        """Return the weights of the A experts chosen for each token, and their indices."""
        config = self.config
        exact = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):  # which would round both
            logits = F.linear(x.to(exact), self.weight.to(exact))
        scores = logits.softmax(dim=-1) if config.scoring_func == "softmax" else logits.sigmoid()
        wanted = scores
        if self.e_score_correction_bias is not None:
            wanted = scores + self.e_score_correction_bias.to(exact)
        chosen = self._allowed(wanted).topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        return weights * config.routed_scaling_factor, chosen

    def _allowed(self, wanted: Tensor) -> Tensor:
        """Return the selection scores `wanted`, (T, N), with -inf for experts outside the best groups."""
        config = self.config
        if config.n_group == 1:
            return wanted
        grouped = wanted.unflatten(1, (config.n_group, config.of_group))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1) if config.has_correction else grouped.amax(dim=-1)
        out = torch.ones_like(best, dtype=torch.bool)
        out = out.scatter(1, best.topk(config.topk_group, dim=-1).indices, value=False)
        return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)


class MixtureOfExperts(nn.Module):
    """The weighted sum of the chosen `experts`, plus `shared_experts`, if there are any.

    Every expert is an MLP made by `mlp` and computes the tokens routed to it; the weights of an expert without tokens
    are not read. The names are Hugging Face's.
    """

    def __init__(self, config: GPTConfig, mlp: Callable[[GPTConfig], nn.Module]) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        width = experts.moe_intermediate_size
        self.gate = Router(config.n_embd, experts)
        one = replace(config, n_hidden=width)
        self.experts = nn.ModuleList([mlp(one) for _ in range(experts.n_routed_experts)])
        self.shared_experts = (
            mlp(replace(config, n_hidden=width * experts.n_shared_experts))
            if experts.n_shared_experts
            else None
        )

    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Apply the chosen experts to each position."""
        rows = x.flatten(0, -2)
        weights, chosen = self.gate(rows)
        order = chosen.flatten().argsort(stable=True)  # each expert's tokens, one expert after another
        counts = chosen.flatten().bincount(minlength=len(self.experts)).tolist()
        tokens, shares = order // chosen.shape[1], weights.flatten()[order, None]
        result = torch.zeros_like(rows)
        parts = zip(self.experts, tokens.split(counts), shares.split(counts), strict=True)
        for expert, at, share in parts:
            if len(at):
                result.index_add_(0, at, (expert(rows[at]) * share).to(x.dtype))
        result = result.view_as(x)
        return result if self.shared_experts is None else result + self.shared_experts(x)
