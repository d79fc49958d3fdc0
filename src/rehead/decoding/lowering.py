"""The program of a model, if that shows all that the model computes."""

from collections.abc import Iterable
from inspect import isabstract
from itertools import repeat
from operator import contains
from typing import Any

import torch
from torch import nn

from rehead.attention.program import Program, Store
from rehead.model import GPT, LanguageModel


def lowered(model: LanguageModel) -> Program | None:
    """Return the program of a model; None if the model must be run with `forward`."""
    if is_intercepted(model) or torch.is_autocast_enabled(model.device.type):
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
    if not isinstance(model, GPT):
        return f"a model of type {model.config.model_type}"
    part = next(model.undescribed(), None)
    if part is None:
        return "its lower returned None"
    if part is model:
        return f"it is {only_forward(model)}"
    place = next(name for name, one in model.named_modules() if one is part)
    if place.endswith("dropout"):
        kind = type(part)
        return f"its {place} is {kind.__module__}.{kind.__qualname__} instead of rehead's Dropout"
    return f"it has {only_forward(part)}"


def only_forward(module: nn.Module) -> str:
    """Describe in words a module that has to be called, and why its `lower` cannot be used, if it has one."""
    kind = type(module)
    words = f"a {kind.__name__} that only its forward describes"
    parent = next((base for base in kind.__mro__ if "lower" in vars(base)), None)
    if parent is kind:
        replaced = [name for name in vars(module) if callable(getattr(kind, name, None))]
        return f"{words}, since its {replaced[0]} is replaced" if replaced else words
    if parent is None or isabstract(parent):
        return words
    return f"{words}, since {kind.__name__} does not repeat `lower = {parent.__name__}.lower`"


def is_intercepted(model: LanguageModel) -> bool:
    """Whether hooks or replaced `forward`s take part in the calls of the model or of one of its parts."""
    return any(hooks(model)) or has_other_forward(map(vars, model.modules()))


def is_whole(model: LanguageModel) -> bool:
    """Whether the model itself must be called, because it has hooks or a `forward` of its own."""
    own = "forward" in vars(model) or type(model).forward is not LanguageModel.forward
    return own or any((model._forward_hooks, model._forward_pre_hooks, *_hooks_of_all()))


def hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Return the tables of forward hooks, of each part and of all modules; a program would not call the hooks."""
    tables = [table for part in model.modules() for table in (part._forward_hooks, part._forward_pre_hooks)]
    return [*tables, *_hooks_of_all()]


def _hooks_of_all() -> list[dict[int, Any]]:
    """Return PyTorch's global tables of forward hooks, in which profilers register theirs."""
    return [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]


def has_other_forward(parts: Iterable[dict[str, Any]]) -> bool:
    """Whether one of these `vars` of modules holds a `forward` of its own, which a program would not call."""
    return any(map(contains, parts, repeat("forward")))


def stored_layers(program: Program) -> list[int]:
    """Return the layers whose cache rows the program writes."""
    return list(dict.fromkeys(op.layer for op in program.ops if isinstance(op, Store)))
