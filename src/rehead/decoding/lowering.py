"""The program of a model, if that shows all that the model computes."""

from collections.abc import Iterable
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn

from rehead.attention.program import Program, Store
from rehead.model import GPT, LanguageModel


def lowered(model: LanguageModel) -> Program | None:
    """Return the program of a model; None if the model must be run with `forward`."""
    if (
        any(hooks(model))
        or has_other_forward(map(vars, model.modules()))
        or torch.is_autocast_enabled(model.device.type)
    ):
        return None
    return model.lower()


def why_not_lowered(model: LanguageModel) -> str:
    """Return the reason why `lowered` returned None."""
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is enabled"
    if any(hooks(model)):
        return "it has forward hooks"
    if has_other_forward(map(vars, model.modules())):
        return "it has a replaced forward"
    if isinstance(model, GPT):
        return "it has parts that only their forward describes"
    return f"a model of type {model.config.model_type}"


def hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Return the tables of forward hooks, of each part and of all modules; a program would not call the hooks."""
    tables = [table for part in model.modules() for table in (part._forward_hooks, part._forward_pre_hooks)]
    every = nn.modules.module  # where profilers enter theirs
    return [*tables, every._global_forward_hooks, every._global_forward_pre_hooks]


def has_other_forward(parts: Iterable[dict[str, Any]]) -> bool:
    """Whether one of these `vars` of modules holds a `forward` of its own, which a program would not call."""
    return any(map(contains, parts, repeat("forward")))


def stored_layers(program: Program) -> list[int]:
    """Return the layers whose cache rows the program writes."""
    return list(dict.fromkeys(op.layer for op in program.ops if isinstance(op, Store)))
