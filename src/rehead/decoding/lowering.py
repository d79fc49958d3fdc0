"""The program of a model, if that shows all that the model computes."""

import torch
from torch import nn

from rehead.attention.program import Program, Store
from rehead.model import GPT, LanguageModel


def lowered(model: LanguageModel) -> Program | None:
    """Return the program of a model; None if the model must be run with `forward`."""
    if is_watched(model) or has_global_hooks() or torch.is_autocast_enabled(model.device.type):
        return None
    return model.lower()


def why_not_lowered(model: LanguageModel) -> str:
    """Return the reason why `lowered` returned None."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is enabled"
    if is_watched(model) or has_global_hooks():
        return "it has forward hooks"
    if isinstance(model, GPT):
        return "it has parts that only their forward describes"
    return f"a model of type {model.config.model_type}"


def is_watched(model: nn.Module) -> bool:
    """Whether a part of the model has forward hooks, which a program would not call."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def has_global_hooks() -> bool:
    """Whether forward hooks are registered for all modules, as profilers do."""
    return bool(nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks)


def stored_layers(program: Program) -> list[int]:
    """Return the layers whose cache rows the program writes."""
    return list(dict.fromkeys(op.layer for op in program.ops if isinstance(op, Store)))
