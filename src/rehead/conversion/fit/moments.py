"""Second moments of what an attention reads, and of the gradients of what it makes of it, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rehead.attention import Attention, GroupedAttention
from rehead.conversion.base import Statistics
from rehead.conversion.fit.pair import Kept, kronecker_pair
from rehead.model import LanguageModel


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


class LayerMoments:
    """Accumulates the statistics of one layer over a text, batch by batch.

    With a `file`, also its inputs x and the gradients g of its stacked keys and values, until they are weighed:
    (C + N) numbers per token.
    """

    def __init__(self, attention: Attention, file: Path | None) -> None:
        self.attention, self.inputs = attention, SecondMoment()
        self.kept = None if file is None else Kept(file)

    @contextmanager
    def watching(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Record the inputs of the attention, and its keys and values before rotation, which get gradients."""
        seen: list[Tensor] = []
        stack: list[Tensor] = []
        hooks = [self.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))]
        if self.kept is not None and isinstance(self.attention, GroupedAttention):
            parts = self.attention.k_proj, self.attention.v_proj
            hooks += [_note(part, stack) for part in parts if part is not None]
        try:
            yield seen, stack
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, inputs: Tensor, gradients: list[Tensor], counts: Tensor) -> None:
        """Add the tokens of a batch that count, (B L,)."""
        rows = inputs.flatten(0, 1)[counts]
        self.inputs.add(torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))
        if self.kept is not None and gradients:
            self.kept.add(rows, torch.cat(gradients, dim=2).flatten(0, 1)[counts])

    def statistics(self) -> Statistics:
        """Return what was found. The file is no longer needed afterwards."""
        pair = kronecker_pair(self.kept) if self.kept is not None and self.kept.width else None
        return Statistics(inputs=self.inputs.mean(), pair=pair)


def _note(part: nn.Module, stack: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.requires_grad_()
        stack.append(output)

    return part.register_forward_hook(hook)
