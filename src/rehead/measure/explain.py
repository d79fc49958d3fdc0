"""Explains which code computes a model, and why, for `rehead bench --explain`.

This module makes no choices: it asks the decoders, each layer's `choice` and the kernels' `choose`.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from rehead.attention import Attention, AttentionConfig
from rehead.attention.kernels import Choice
from rehead.attention.kernels.compiled import Compiled
from rehead.attention.kernels.definition import Reference
from rehead.decoding import batch_refusal, graph_engine, graph_refusal, native_refusal
from rehead.model import GPT, LanguageModel, evaluating, modes_kept
from rehead.model.layers import Block

GAPS = "; PyTorch where the positions of a cache have gaps"


def explain(model: LanguageModel, batch_size: int = 1) -> list[str]:
    """Return a line per choice for this model, on its device and in its dtype, for `batch_size` sequences.

    `prompts` have equal lengths and are read into an empty cache; with unequal lengths there are positions, and
    some kernels refuse those. `training` is a forward and backward pass.
    """
    lines = [f"decoding: {_decoding(model, batch_size)}"]
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


def explain_all(model: LanguageModel, batch_sizes: Sequence[int]) -> list[str]:
    """Return the lines of `explain` for several batch sizes; a line that is not that of all sizes names its own."""
    lines = []
    for said in zip(*(explain(model, size) for size in batch_sizes), strict=True):
        for line in dict.fromkeys(said):
            sizes = [str(size) for size, its in zip(batch_sizes, said, strict=True) if its == line]
            lines.append(line if len(sizes) == len(said) else f"batch {', '.join(sizes)}: {line}")
    return lines


def _decoding(model: LanguageModel, batch_size: int) -> str:
    no_decoder, no_graph = native_refusal(model) or batch_refusal(batch_size), graph_refusal(model)
    if no_decoder is None:
        threads = torch.get_num_threads()
        return f"one call a token into the C++ decoder, on {threads} thread{'s' * (threads > 1)}{GAPS}"
    if no_graph is None:
        return f"CUDA graphs, one per length bucket{GAPS}"
    of_device = model.device.type == graph_engine.DEVICE
    reason = f"CUDA graphs: {no_graph}" if of_device else f"C++ decoder: {no_decoder}"
    return f"PyTorch, one operation after another (no {reason})"


def _texts(attention: Attention, n_past: int | None, batch_size: int, longest: int) -> str:
    """Return the code for texts of 1 to `longest` tokens, and why it is not the C++ attention kernel."""

    def choose(n_token: int) -> Choice | None:
        return attention.choice(n_token, n_past, batch_size)

    stretches = []
    for first, last, choice in ranges(choose, longest):
        if choice is None:
            return "this variant does not say"
        words = f"{choice.form}, {choice.kernel.words}" if choice.form else choice.kernel.words
        tokens = f"{first} token{'s' * (first > 1)}" if first == last else f"{first} to {last} tokens"
        stretches.append(f"{tokens}: {words}{_why_not_faster(choice)}")
    return "; ".join(stretches)


def _why_not_faster(choice: Choice) -> str:
    """Return why the C++ attention kernel refused, if it did; for the reference kernel, why every other one did."""
    if not isinstance(choice.kernel, Reference):
        reason = choice.against.get(Compiled.name)
        return f" (no C++ attention kernel: {reason})" if reason else ""
    names: dict[str, list[str]] = {}
    for name, reason in choice.against.items():
        names.setdefault(reason, []).append(name)
    if len(names) == 1:
        return f" (no other kernel: {next(iter(names))})"
    return " (" + ", ".join(f"no {' or '.join(those)}: {reason}" for reason, those in names.items()) + ")"


def ranges(choose: Callable[[int], Choice | None], longest: int) -> Iterator[tuple[int, int, Choice | None]]:
    """Yield first length, last length and choice of each stretch of lengths with the same choice.

    Lengths are probed by doubling; a change between two of them is located by bisection.
    """
    first, choice = 1, choose(1)
    while first <= longest:
        last, step = first, 1
        while last < longest and (following := choose(min(last + step, longest))) == choice:
            last, step, choice = min(last + step, longest), 2 * step, following
        beyond = min(last + step, longest + 1)
        while beyond - last > 1:
            middle = (last + beyond) // 2
            last, beyond = (middle, beyond) if choose(middle) == choice else (last, middle)
        yield first, last, choice
        first = last + 1
        choice = choose(first) if first <= longest else None
