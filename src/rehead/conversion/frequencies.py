"""The frequencies of an uneven rotary part: those whose rotation matters most, over all layers."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.checkpoint.files.deferred import materialise
from rehead.config import GPTConfig
from rehead.conversion.base import Statistics, heads_of
from rehead.conversion.fit.moments import attentions
from rehead.conversion.rotary import require_one_rotation
from rehead.conversion.search import path
from rehead.conversion.steps.deepseek import repeated
from rehead.conversion.steps.rotations import all_rotated, directions
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.model import LanguageModel


def are_open(layer: AttentionConfig, wanted: AttentionConfig) -> bool:
    """Whether the frequencies of `wanted` can be chosen: its rotary part is made from rotary heads."""
    is_decoupled = isinstance(wanted, LatentConfig) and wanted.qk_rope_head_dim > 0
    return is_decoupled and isinstance(heads_of(layer), GroupedConfig)


def is_choice(layer: AttentionConfig, wanted: AttentionConfig) -> bool:
    """Whether the rotary part of `wanted` is made from some rotations of the keys, not from all of them."""
    source = heads_of(layer)
    if not (
        are_open(layer, wanted) and isinstance(wanted, LatentConfig) and isinstance(source, GroupedConfig)
    ):
        return False
    return wanted.qk_rope_head_dim < all_rotated(source)


def require_rotation(target: Target, layers: Sequence[AttentionConfig]) -> None:
    """Refuse options about rope for a model without, and about the rotary part for one that is an MLA already.

    Also an uneven rotary part of layers that rotate in different ways.
    """
    given = {"rope_dim": target.rope_dim, "target": None if target.target == "rebuilt" else target.target}
    for name, value in (given | {"rope_layout": target.rope_layout}).items():
        if value is not None and all(layer.rope is None for layer in layers):
            raise ConfigError(f"{name}={value}: none of its layers rotates its keys. Leave it out.")
        if name in given and value is not None and all(isinstance(layer, LatentConfig) for layer in layers):
            raise ConfigError(
                f"{name}={value}: a rotary part is made from heads, and this model has latents already. Leave it out, "
                "or convert the model it was made from."
            )
    if target.target == "uneven":
        require_one_rotation(layers)


def with_frequencies(
    model: LanguageModel, wanted: Sequence[AttentionConfig], statistics: Sequence[Statistics]
) -> list[AttentionConfig]:
    """Return `wanted`, an attention per layer, with the frequencies that matter most in every rotary part.

    They are the same in all layers, as stock classes have one rope per model. `statistics` are those of the layers of
    `model`, with `turns`.
    """
    matters: list[Tensor] = []
    at = []
    assert isinstance(model.config, GPTConfig)
    for index, (module, layer) in enumerate(zip(attentions(model), model.config.attention, strict=True)):
        source = heads_of(layer)
        if not are_open(layer, wanted[index]):
            continue
        assert isinstance(source, GroupedConfig)
        source = replace(source, head_map="contiguous")
        at.append((index, source))
        weights = {
            name: materialise(weight.detach()).double().cpu() for name, weight in module.named_parameters()
        }
        for step in path(layer, source, model.config.n_embd):
            weights = step.conversion.convert(weights, step.source, step.result, Statistics(), "").weights
        matters.append(directions(weights, source, statistics[index].in_memory()).matters)
    total = reduce(torch.add, matters)
    chosen = list(wanted)
    for index, source in at:
        chosen[index] = _with_best(wanted[index], total, source)
    return chosen


def _with_best(wanted: AttentionConfig, matters: Tensor, source: GroupedConfig) -> AttentionConfig:
    """Return `wanted` with the pairs that matter most."""
    assert isinstance(wanted, LatentConfig)
    assert source.rope is not None
    n_pair, n_kv_head = wanted.qk_rope_head_dim // 2, matters.shape[1]
    order = torch.sort(matters.flatten(), descending=True, stable=True).indices
    pairs = sorted((order[:n_pair] // n_kv_head).tolist())
    assert wanted.rope is not None
    rope = repeated(source.rope, source.head_dim, wanted.qk_rope_head_dim, pairs)
    return replace(wanted, rope=replace(rope, layout=wanted.rope.layout))
