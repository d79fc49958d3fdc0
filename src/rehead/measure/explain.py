"""By which way a model computes, and why: what `rehead bench --explain` says.

Nothing is decided here: the decoders, each layer's `choice` and the kernels' `choose` are asked.
"""

from collections.abc import Callable, Iterator

import torch

from rehead.attention import Attention, AttentionConfig
from rehead.attention.kernels import Choice
from rehead.attention.kernels.compiled import Compiled
from rehead.attention.kernels.definition import Reference
from rehead.decoding import graphed, why_no_graph, why_not
from rehead.model import GPT, LanguageModel, evaluating, modes_kept
from rehead.model.layers import Block


def explain(model: LanguageModel, batch_size: int = 1) -> list[str]:
    """A line per choice that is made for this model, on its device and in its dtype, for `batch_size` sequences.

    `prompts` are equally long, read into an empty cache; a batch of unlike lengths gives positions, by which some
    ways refuse. `training` is a forward and backward pass.
    """
    lines = [f"decoding: {_decoding(model)}"]
    if not isinstance(model, GPT):
        return lines
    layers: dict[AttentionConfig, list[int]] = {}
    for index, config in enumerate(model.config.attention):
        layers.setdefault(config, []).append(index)
    for config, places in layers.items():
        block = model.layers[places[0]]
        assert isinstance(block, Block)
        some = f"layer {places[0]}" if len(places) == 1 else f"layers {', '.join(map(str, places))}"
        with evaluating(model), torch.no_grad():
            prompts = _texts(block.self_attn, 0, batch_size, model.config.block_size)
        with modes_kept(model), torch.enable_grad():
            training = _texts(block.self_attn.train(), None, batch_size, model.config.block_size)
        parts = f"one token: {block.self_attn.one_token()}", f"prompts: {prompts}", f"training: {training}"
        lines += [f"{some}, {config.name}, {part}" for part in parts]
    return lines


def _decoding(model: LanguageModel) -> str:
    no_kernel, no_graph = why_not(model), why_no_graph(model)
    if no_kernel is None:
        threads = torch.get_num_threads()
        return f"one call a token into the C++ kernel, on {threads} thread{'s' * (threads > 1)}"
    if no_graph is None:
        return "CUDA graphs, one per length bucket"
    of_device = model.device.type == graphed.DEVICE
    reason = f"CUDA graphs: {no_graph}" if of_device else f"C++ kernel: {no_kernel}"
    return f"PyTorch, a step a layer (no {reason})"


def _texts(attention: Attention, n_past: int | None, batch_size: int, longest: int) -> str:
    """The ways for texts of 1 to `longest` tokens, and the reasons against those that the last is not."""

    def way(n_token: int) -> Choice | None:
        return attention.choice(n_token, n_past, batch_size)

    said = []
    for first, last, found in ranges(way, longest):
        if found is None:
            return "not said by this variant"
        words = f"{found.form}, {found.kernel.words}" if found.form else found.kernel.words
        tokens = f"{first} token{'s' * (first > 1)}" if first == last else f"{first} to {last} tokens"
        said.append(f"{tokens}: {words}{_against(found)}")
    return "; ".join(said)


def _against(found: Choice) -> str:
    """Why not the C++ kernel, where it is not the way."""
    reason = found.against.get(Compiled.name)
    return f" (no C++ kernel: {reason})" if reason and not isinstance(found.kernel, Reference) else ""


def ranges(way: Callable[[int], Choice | None], longest: int) -> Iterator[tuple[int, int, Choice | None]]:
    """First and last length of each stretch that goes one way, with what is said of its last.

    Lengths are looked at by doubling, and a change between two of them is found by halving.
    """
    first, found = 1, way(1)
    while first <= longest:
        last, step = first, 1
        while last < longest and (next_found := way(min(last + step, longest))) == found:
            last, step, found = min(last + step, longest), 2 * step, next_found
        beyond = min(last + step, longest + 1)
        while beyond - last > 1:
            middle = (last + beyond) // 2
            last, beyond = (middle, beyond) if way(middle) == found else (last, middle)
        yield first, last, found
        first = last + 1
        found = way(first) if first <= longest else None
