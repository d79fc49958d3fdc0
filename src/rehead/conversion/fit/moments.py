"""Second moments of what an attention reads, and of the gradients of what it makes of it, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rehead.attention import Attention, GroupedAttention, LatentAttention
from rehead.conversion.base import Statistics
from rehead.conversion.fit.pair import Kept, kronecker_pair
from rehead.conversion.fit.turns import Turns
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

    With a `file`, also stores its inputs x and the gradients g of its stacked keys and values there, (C + N) numbers
    per token, until they are weighed. With `turning`, the number of tokens in the text and the least of them that are
    read for it, also measures how much the rotation of its keys matters.
    """

    def __init__(
        self, attention: Attention, file: Path | None, *, turning: tuple[int, int] | None = None
    ) -> None:
        self.attention, self.inputs = attention, SecondMoment()
        self.kept = None if file is None else Kept(file)
        self.turns = Turns(*turning) if turning is not None and _can_turn(attention) else None

    @contextmanager
    def watching(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Record the inputs of the attention, and what gets gradients.

        That is its keys and values before rotation, and for `turns`, last, the input of its output projection.
        """
        seen: list[Tensor] = []
        stack: list[Tensor] = []
        hooks = [self.attention.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))]
        if self.kept is not None:
            hooks += [_note(part, stack) for part in _expanding(self.attention)]
        if self.turns is not None:
            assert isinstance(self.attention, GroupedAttention)
            output = self.attention.o_proj
            hooks.append(output.register_forward_pre_hook(lambda _, args: stack.append(args[0])))
        try:
            yield seen, stack
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, inputs: Tensor, gradients: list[Tensor], counts: Tensor) -> None:
        """Add the tokens of a batch that count, (B L,)."""
        if self.turns is not None and gradients:
            assert isinstance(self.attention, GroupedAttention)
            *gradients, pull = gradients
            self.turns.add(self.attention, inputs, pull)
        rows = inputs.flatten(0, 1)[counts]
        self.inputs.add(torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1))
        if self.kept is not None and gradients:
            self.kept.add(rows, torch.cat(gradients, dim=2).flatten(0, 1)[counts])

    def statistics(self) -> Statistics:
        """Return the statistics. The file may be deleted afterwards."""
        pair = kronecker_pair(self.kept) if self.kept is not None and self.kept.width else None
        turns = None if self.turns is None else self.turns.mean()
        return Statistics(inputs=self.inputs.mean(), pair=pair, turns=turns)


def _expanding(attention: Attention) -> list[nn.Module]:
    """Return the modules that make keys and values, which are then rotated."""
    if isinstance(attention, GroupedAttention):
        return [part for part in (attention.k_proj, attention.v_proj) if part is not None]
    return [attention.kv_b_proj] if isinstance(attention, LatentAttention) else []


def _can_turn(attention: Attention) -> bool:
    return isinstance(attention, GroupedAttention) and attention.rotary is not None


def _note(part: nn.Module, stack: list[Tensor]) -> torch.utils.hooks.RemovableHandle:
    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        output.requires_grad_()
        stack.append(output)

    return part.register_forward_hook(hook)
