"""By which way a model computes, and why: what `rehead bench --explain` says."""

import torch
from torch import Tensor

from rehead.attention import AttentionConfig, GroupedConfig, LatentConfig, flash, sequence
from rehead.attention.kernels import LONG
from rehead.attention.score import ScaledDot
from rehead.decoding import graphed, why_no_graph, why_not
from rehead.model import GPT, LanguageModel
from rehead.native.sequence import serves


def explain(model: LanguageModel) -> list[str]:
    """A line per choice that is made for this model, on its device and in its dtype."""
    no_kernel, no_graph = why_not(model), why_no_graph(model)
    if no_kernel is None:
        threads = torch.get_num_threads()
        lines = [f"decoding: one call a token into the C++ kernel, on {threads} thread{'s' * (threads > 1)}"]
    elif no_graph is None:
        lines = ["decoding: CUDA graphs, one per length bucket"]
    else:
        of_device = model.device.type == graphed.DEVICE
        reason = f"CUDA graphs: {no_graph}" if of_device else f"C++ kernel: {no_kernel}"
        lines = [f"decoding: PyTorch, a step a layer (no {reason})"]
    if not isinstance(model, GPT):
        return lines
    by_config: dict[AttentionConfig, list[int]] = {}
    for index, config in enumerate(model.config.attention):
        by_config.setdefault(config, []).append(index)
    for config, layers in by_config.items():
        some = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
        parts = _one_token(config), _many_tokens(config, model.head.weight)
        lines += [f"{some}, {config.name}, {part}" for part in parts]
    return lines


def _one_token(config: AttentionConfig) -> str:
    if isinstance(config, GroupedConfig) and not isinstance(config.score, ScaledDot):
        return "one token: slow, a learned score has only the reference kernel"
    if isinstance(config, LatentConfig):
        if config.absorbs_below <= 1:
            return f"one token: expanded, {config.n_kv_head} KV heads cost less than a latent of {config.kv_lora_rank}"
        if config.rebuilds_keys:
            return "one token: slow, rotated keys are rebuilt from all latents; values are absorbed"
        return f"one token: absorbed, up to {config.absorbs_below:.0f} new ones at once have fewer FLOPs so"
    return (
        "one token: two products a KV head, its group of query heads folded into the rows; keys are read once"
    )


def _many_tokens(config: AttentionConfig, like: Tensor) -> str:
    if isinstance(config, GroupedConfig) and not isinstance(config.score, ScaledDot):
        return "texts: slow, O(L^2) memory, a learned score has only the reference kernel"
    expanded = "expanded, then " if isinstance(config, LatentConfig) else ""
    if like.dtype in sequence.WIDENED and serves(like):
        what = (
            f"up to {sequence.LONGEST} tokens, then SDPA" if config.window is None else "of the window only"
        )
        return f"texts: {expanded}the C++ kernel, {what}"
    if config.window is not None:
        flashes = like.device.type == flash.DEVICE and like.dtype in flash.DTYPES
        way = "by windowed flash attention, if it agrees here," if flashes else "in chunks of the window"
        return f"texts: {expanded}{way} from {max(LONG, 2 * config.window)} tokens on, SDPA before"
    return f"texts: {expanded}SDPA"
