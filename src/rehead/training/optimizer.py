"""AdamW as in minGPT, and its learning-rate schedule."""

import math

import torch
from torch import nn

from rehead.config import TrainerOptions


def build_optimizer(model: nn.Module, options: TrainerOptions) -> torch.optim.AdamW:
    """Return an AdamW that decays the weights of linear layers, not embeddings, norms, biases or learned scores."""
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    embedding = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    learning = [p for p in model.parameters() if p.requires_grad]
    decaying = [p for p in learning if id(p) in linear - embedding]
    others = [p for p in learning if id(p) not in linear - embedding]
    groups = [
        {"params": decaying, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=(options.beta1, options.beta2), fused=True
    )


def learning_rate(step: int, options: TrainerOptions) -> float:
    """Return the rate of step 0, 1, ...: a linear warm-up, then constant or a cosine down to the minimum."""
    if step < options.warmup_iters:
        return options.learning_rate * (step + 1) / options.warmup_iters
    if options.schedule == "constant":
        return options.learning_rate
    done = (step - options.warmup_iters) / max(1, options.max_iters - options.warmup_iters)
    span = options.learning_rate - options.min_learning_rate
    return options.min_learning_rate + span * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
