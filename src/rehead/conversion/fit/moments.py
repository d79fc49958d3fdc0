"""Statistics of each layer over a text: second moments in float64. Activations, where needed, are kept on disk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rehead.attention import Attention, GroupedAttention
from rehead.checkpoint.files.deferred import materialise
from rehead.conversion.base import Statistics
from rehead.conversion.fit.pair import Kept, kronecker_pair
from rehead.data import IGNORE
from rehead.model import LanguageModel, evaluating
from rehead.sampling import draw, probabilities
from rehead.stages import staged

LOGITS = 2**23
"""Logits computed at once, with a large vocabulary."""


class SecondMoment:
    """Accumulates x x^T over tokens."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Add every row of (N, W)."""
        rows = rows.detach().to("cpu", torch.float64)
        product = rows.mT @ rows
        self.total = product if self.total is None else self.total + product
        self.count += len(rows)

    def mean(self) -> Tensor | None:
        """Return E[x x^T], None if nothing was added."""
        return None if self.total is None else self.total / self.count


def attentions(model: LanguageModel) -> list[Attention]:
    """Return the attention of every layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def gather(
    model: LanguageModel,
    blocks: Iterable[tuple[Tensor, Tensor]],
    *,
    gradients: bool,
    seed: int = 0,
    scratch: Path | None = None,
) -> list[Statistics]:
    """Return the statistics of every layer over a text; `pair` only with `gradients`.

    The gradient is that of the summed loss, so a key also counts for every later token that reads it. Labels
    are drawn from the model's own predictions, seeded, and not taken from the text: this gives the true Fisher
    information. While the text is read, x and g are kept in files below `scratch`: (C + N) numbers per token
    and layer.
    """
    layers = attentions(model)
    inputs = [SecondMoment() for _ in layers]
    noise = np.random.default_rng(seed)
    with TemporaryDirectory(dir=scratch) as folder, _observing(model, gradients=gradients):
        kept = [Kept(Path(folder) / f"{index}") for index in range(len(layers))]
        for ids, targets in blocks:
            counts = (targets != IGNORE).flatten()
            seen: list[Tensor] = []
            stacks: list[list[Tensor]] = []
            with _watching(layers, seen, stacks):
                hidden = model.hidden(ids.to(model.device))
            rows = [x.flatten(0, 1)[counts] for x in seen]
            for moment, x in zip(inputs, rows, strict=True):
                moment.add(torch.cat([x, x.new_ones(len(x), 1)], dim=1))
            if not gradients:
                continue
            pull = _pull(model, hidden.detach(), counts, torch.from_numpy(noise.random(len(counts))))
            parts = [part for stack in stacks for part in stack]
            found = iter(torch.autograd.grad(hidden, parts, pull))
            for file, x, stack in zip(kept, rows, stacks, strict=True):
                if stack:
                    file.add(x, torch.cat([next(found) for _ in stack], dim=2).flatten(0, 1)[counts])
        pairs: Iterable[tuple[SecondMoment, Kept]] = zip(inputs, kept, strict=True)
        if gradients:
            pairs = staged(pairs, "weighing what was read", len(layers), "layers")
        return [
            Statistics(inputs=one.mean(), pair=kronecker_pair(file) if file.width else None)
            for one, file in pairs
        ]


@torch.no_grad()
def _pull(model: LanguageModel, hidden: Tensor, counts: Tensor, noise: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to `hidden` (B, L, D), for labels drawn by `noise` (B L,)."""
    pull = torch.zeros_like(hidden).flatten(0, 1)
    flat, weight = hidden.flatten(0, 1), materialise(model.head.weight)
    cap = getattr(model.config, "logit_softcap", None)
    for at in counts.nonzero()[:, 0].split(max(1, LOGITS // len(weight))):
        logits = model.logits(flat[at])
        likely = probabilities(logits)
        label = draw(likely, noise[at].to(likely.device))
        error = likely - F.one_hot(label, len(weight))
        if cap is not None:
            error = error * (1 - (logits / cap) ** 2)  # the derivative of the soft cap
        pull[at] = error.to(weight.dtype) @ weight
    return pull.view_as(hidden)


@contextmanager
def _observing(model: LanguageModel, *, gradients: bool) -> Iterator[None]:
    """Switch off dropout and the gradients of weights; enable those of activations if asked. Restores both."""
    needed = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(requires_grad=False)
    try:
        with evaluating(model), torch.set_grad_enabled(gradients):
            yield
    finally:
        for weight, need in zip(model.parameters(), needed, strict=True):
            weight.requires_grad_(need)


@contextmanager
def _watching(layers: list[Attention], seen: list[Tensor], stacks: list[list[Tensor]]) -> Iterator[None]:
    """Record the input of every attention, and its keys and values before rotation."""
    hooks = []
    for layer in layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())))
        stack: list[Tensor] = []
        stacks.append(stack)
        if isinstance(layer, GroupedAttention):
            hooks += [_note(part, stack) for part in (layer.k_proj, layer.v_proj) if part is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note(part: nn.Module, stack: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled():
            output.requires_grad_()
        stack.append(output)

    return part.register_forward_hook(hook)
