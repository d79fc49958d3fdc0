"""The frequencies of an uneven rotary part: those whose rotation matters most, over all layers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig
from rehead.checkpoint.files.deferred import materialise
from rehead.config import GPTConfig
from rehead.conversion.base import Statistics, heads_of
from rehead.conversion.fit.directions import Directions
from rehead.conversion.fit.moments import attentions
from rehead.conversion.fit.turns import REACH
from rehead.conversion.rotary import require_one_rotation
from rehead.conversion.search import path
from rehead.conversion.steps.deepseek import repeated
from rehead.conversion.steps.rotations import all_rotated, directions
from rehead.conversion.target import Target
from rehead.errors import ConfigError
from rehead.model import LanguageModel
from rehead.stages import staged


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
    assert isinstance(model.config, GPTConfig)
    at = [index for index, layer in enumerate(model.config.attention) if are_open(layer, wanted[index])]
    modules = list(attentions(model))
    found = (
        _directions(modules[index], model.config.attention[index], model.config.n_embd, statistics[index])
        for index in staged(at, "choosing frequencies", len(at), "layers")
    )
    first = wanted[at[0]]
    assert isinstance(first, LatentConfig)
    pairs = best_pairs(found, first.qk_rope_head_dim // 2)
    chosen = list(wanted)
    for index in at:
        chosen[index] = _with(wanted[index], pairs, _heads(model.config.attention[index]))
    return chosen


def _heads(layer: AttentionConfig) -> GroupedConfig:
    """Return the heads that a rotary part is made from."""
    source = heads_of(layer)
    assert isinstance(source, GroupedConfig)
    return replace(source, head_map="contiguous")


def _directions(module: nn.Module, layer: AttentionConfig, n_embd: int, statistics: Statistics) -> Directions:
    """Return the directions of one layer."""
    source = _heads(layer)
    weights = {
        name: materialise(weight.detach()).double().cpu() for name, weight in module.named_parameters()
    }
    for step in path(layer, source, n_embd):
        weights = step.conversion.convert(weights, step.source, step.result, Statistics(), "").weights
    return directions(weights, source, statistics.in_memory())


def _with(wanted: AttentionConfig, pairs: list[int], source: GroupedConfig) -> AttentionConfig:
    """Return `wanted` with these pairs in its rotary part."""
    assert isinstance(wanted, LatentConfig)
    assert source.rope is not None
    assert wanted.rope is not None
    rope = repeated(source.rope, source.head_dim, wanted.qk_rope_head_dim, pairs)
    return replace(wanted, rope=replace(rope, layout=wanted.rope.layout))


def best_pairs(layers: Iterable[Directions], n_pair: int) -> list[int]:
    """Return `n_pair` pairs by whose angles the keys turn with the least loss, each as often as it is used.

    The pairs of a head, in the order of their angles, fall into groups that turn by the angle of one of them, along a
    number of directions of its own. What that saves is summed over the layers, of which one at a time is held, and the
    best groups are found from the first pair on (dynamic programming).
    """
    sums: dict[tuple[int, int, int], Tensor] = {}
    total = n_kv_head = 0
    for layer in layers:
        n_kv_head, total = layer.keys.shape[:2]
        for end in range(1, total + 1):
            for start, to in _groups(end):
                saving, group = layer.saving(range(start, end), to), (start, end, to)
                sums[group] = sums[group] + saving if group in sums else saving
    savings = {group: saving.cumsum(0).tolist() for group, saving in sums.items()}
    chosen: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]  # up to a pair, by their number
    for end in range(1, total + 1):
        found = dict(chosen[-1])  # if the last of them does not turn
        for start, to in _groups(end):
            for before, (saved, pairs) in chosen[start].items():
                for many in range(1, min(n_kv_head, n_pair - before) + 1):
                    new = saved + savings[start, end, to][many - 1]
                    if new > found.get(before + many, (-1.0, ()))[0]:
                        found[before + many] = new, (*pairs, *[to] * many)
        chosen.append(found)
    return sorted(chosen[-1][n_pair][1])


def _groups(end: int) -> Iterator[tuple[int, int]]:
    """Yield the first pair and the one with the angle of every group of neighbours whose last is before `end`."""
    for start in range(max(0, end - REACH - 1), end):
        for to in range(start, end):
            yield start, to
