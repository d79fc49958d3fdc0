"""A model with other attentions."""

from collections.abc import Sequence
from dataclasses import replace

from rehead.attention import Attention, AttentionConfig
from rehead.checkpoint.files.deferred import map_deferred
from rehead.config import GPTConfig
from rehead.conversion.base import Weights
from rehead.model import GPT, LanguageModel, assembled

Layers = list[tuple[AttentionConfig, Weights]]


def with_layers(model: LanguageModel, layers: Sequence[tuple[AttentionConfig, Weights]]) -> GPT:
    """Return `model` with other attentions, in its dtype, on its device, in eval mode; the rest is shared."""
    assert isinstance(model.config, GPTConfig)
    config = replace(model.config, attention=tuple(config for config, _ in layers))
    dtype, device = model.head.weight.dtype, model.device
    names = {module: name for name, module in model.named_modules() if isinstance(module, Attention)}
    state = {
        name: weight.detach()
        for name, weight in model.state_dict().items()
        if not name.startswith(tuple(f"{prefix}." for prefix in names.values()))
    }
    for prefix, (_, weights) in zip(names.values(), layers, strict=True):
        state |= {
            f"{prefix}.{name}": map_deferred(lambda exact: exact.to(dtype), weight).to(device)
            for name, weight in weights.items()
        }
    result = assembled(config, state)
    assert isinstance(result, GPT)
    return result
