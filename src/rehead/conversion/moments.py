"""What a text shows of each layer, streamed: second moments in float64, never the activations."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rehead.attention import Attention, GroupedAttention
from rehead.conversion.base import Evidence
from rehead.data import IGNORE
from rehead.model import LanguageModel, evaluating


class Moment:
    """A sum of x x^T over tokens."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Count every row of (N, W)."""
        rows = rows.detach().to("cpu", torch.float64)
        product = rows.mT @ rows
        self.total = product if self.total is None else self.total + product
        self.count += len(rows)

    def mean(self) -> Tensor | None:
        """E[x x^T], None if nothing was counted."""
        return None if self.total is None else self.total / self.count


def attentions(model: LanguageModel) -> list[Attention]:
    """The attention of every layer."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def gather(
    model: LanguageModel, blocks: Iterable[tuple[Tensor, Tensor]], *, gradients: bool
) -> list[Evidence]:
    """The evidence of every layer over a text; that of `outputs` only with `gradients`.

    The gradient is that of the summed loss, so a key answers for every later token that reads it.
    """
    layers = attentions(model)
    inputs, outputs = [Moment() for _ in layers], [Moment() for _ in layers]
    with _observing(model, gradients=gradients):
        for ids, targets in blocks:
            counts = (targets != IGNORE).flatten()
            seen: list[Tensor] = []
            stacks: list[list[Tensor]] = []
            with _watching(layers, seen, stacks):
                hidden = model.hidden(ids.to(model.device))
            for moment, x in zip(inputs, seen, strict=True):
                rows = x.flatten(0, 1)[counts]
                moment.add(torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))
            if not gradients:
                continue
            logits = model.head(hidden)
            exact = torch.promote_types(logits.dtype, torch.float32)
            loss = F.cross_entropy(
                logits.flatten(0, 1).to(exact), targets.to(model.device).flatten(), reduction="sum"
            )
            found = iter(torch.autograd.grad(loss, [part for stack in stacks for part in stack]))
            for moment, stack in zip(outputs, stacks, strict=True):
                if stack:
                    moment.add(torch.cat([next(found) for _ in stack], dim=2).flatten(0, 1)[counts])
    return [
        Evidence(inputs=one.mean(), outputs=other.mean()) for one, other in zip(inputs, outputs, strict=True)
    ]


@contextmanager
def _observing(model: LanguageModel, *, gradients: bool) -> Iterator[None]:
    """Without dropout, and with gradients or without, whatever was set before."""
    needed = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(gradients)
    try:
        with evaluating(model), torch.set_grad_enabled(gradients):
            yield
    finally:
        for weight, need in zip(model.parameters(), needed, strict=True):
            weight.requires_grad_(need)


@contextmanager
def _watching(layers: list[Attention], seen: list[Tensor], stacks: list[list[Tensor]]) -> Iterator[None]:
    """Note what every attention is given, and the keys and values it makes before they are rotated."""
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
    return part.register_forward_hook(lambda _, args, output: stack.append(output))
