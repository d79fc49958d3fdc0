"""Statistics of every layer of a model over a text, gathered one layer at a time.

The text passes forward through one layer after another, then its gradients pass back. Between layers, the hidden
states are on disk; memory holds the weights of one layer and the activations of one batch in it.
"""

from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rehead.checkpoint.files.deferred import held
from rehead.checkpoint.files.kept import keep, kept
from rehead.conversion.base import Statistics
from rehead.conversion.fit.moments import LayerMoments, attentions
from rehead.conversion.fit.states import States
from rehead.data import IGNORE
from rehead.data.batches import Pair
from rehead.model import GPT, evaluating
from rehead.sampling import draw, probabilities
from rehead.stages import staged
from rehead.system.allocator import keeping_freed_memory

LOGITS, EXACT = 2**23, 2**20
"""Logits computed, and held in float64, at once, with a large vocabulary."""


def gather(
    model: GPT,
    blocks: Iterable[Pair],
    folder: Path,
    *,
    needs: Collection[str],
    seed: int = 0,
    n_text: int = 1,
) -> list[Statistics]:
    """Return the statistics of every layer over a text, deferred: `inputs`, and `pair` and `turns` if in `needs`.

    The blocks are `n_text` texts in equal shares. The gradient is that of the summed loss, so a key also counts for
    every later token that reads it. Labels are drawn from the model's own predictions, seeded, and not taken from the
    text: this gives the true Fisher information.

    The disk holds, per token, the hidden states of every layer (without gradients, of one) and, for one layer, its
    inputs and the gradients of its keys and values. `folder` keeps finished layers: called again with the same
    arguments, an interrupted run resumes after the last of them, with the same results.
    """
    gradients = not {"pair", "turns"}.isdisjoint(needs)
    reading = _Reading(model, list(blocks), folder, seed, needs, n_text)
    work = reading.forward_and_backward() if gradients else reading.forward_only()
    total = (1 + gradients) * len(model.layers) * len(reading.blocks)
    with keeping_freed_memory(), _observing(model, gradients=gradients), closing(work):
        for _ in staged(work, "reading what to fit to", total, "batches"):
            pass
    return [reading.statistics(index) for index in range(len(model.layers))]


@contextmanager
def _observing(model: GPT, *, gradients: bool) -> Iterator[None]:
    """Switch off dropout and the gradients of weights; enable those of activations if asked. Restores both."""
    needed = [weight.requires_grad for weight in model.parameters()]
    model.requires_grad_(requires_grad=False)
    try:
        with evaluating(model), torch.set_grad_enabled(gradients):
            yield
    finally:
        for weight, need in zip(model.parameters(), needed, strict=True):
            weight.requires_grad_(need)


class _Reading:
    """Passes a text through a model. `forward_only` and `forward_and_backward` yield after every batch of a layer."""

    def __init__(
        self,
        model: GPT,
        blocks: Sequence[Pair],
        folder: Path,
        seed: int,
        needs: Collection[str],
        n_text: int,
    ) -> None:
        self.n_text = n_text
        self.model, self.blocks, self.folder, self.seed, self.needs = model, blocks, folder, seed, needs
        self.counts = [(targets != IGNORE).flatten() for _, targets in blocks]
        self.attentions, self.n_layer = attentions(model), len(model.layers)

    def forward_only(self) -> Generator[None]:
        """Take every layer's statistics on the way forward."""
        first = sum(self._is_kept(index) for index in range(self.n_layer))
        yield from self._skip(first)
        if first == 0:
            self._embed()
        for index in range(first, self.n_layer):
            moments = LayerMoments(self.attentions[index], None)
            with held(self.model.layers[index]):
                yield from self._states(index + 1).write(self._forward(index, moments))
            keep(self._place(index), moments.statistics().tensors())
            self._states(index).remove()
        self._states(self.n_layer).remove()

    def forward_and_backward(self) -> Generator[None]:
        """Keep the hidden states on the way forward; take every layer's statistics on the way back."""
        last = self.n_layer - sum(self._is_kept(index) for index in range(self.n_layer))
        yield from self._write_states()
        yield from self._skip(self.n_layer - last)
        for index in reversed(range(last)):
            tokens = self._unwritten(f"tokens-{index}")
            file = tokens if "pair" in self.needs else None
            windows = self.n_text * max(ids.shape[1] for ids, _ in self.blocks)
            turning = (sum(map(len, self.counts)), windows) if "turns" in self.needs else None
            moments = LayerMoments(self.attentions[index], file, turning=turning)
            with held(self.model.layers[index]):
                yield from self._gradients(index).write(self._backward(index, moments))
            keep(self._place(index), moments.statistics().tensors())
            tokens.unlink(missing_ok=True)
            self._states(index).remove()
            self._gradients(index + 1).remove()
        self._gradients(0).remove()

    def _write_states(self) -> Iterator[None]:
        """Write the hidden states of every layer, and the gradients of the last ones."""
        if self._is_kept(self.n_layer - 1) or self._gradients(self.n_layer).exists:
            yield from self._skip(self.n_layer)
            return
        done = max((depth for depth in range(self.n_layer + 1) if self._states(depth).exists), default=None)
        if done is None:
            self._embed()
        yield from self._skip(done or 0)
        for index in range(done or 0, self.n_layer):
            with held(self.model.layers[index]):
                yield from self._states(index + 1).write(self._forward(index))
        with held(self.model.head):
            deque(self._gradients(self.n_layer).write(self._gradients_of_loss()), maxlen=0)
        self._states(self.n_layer).remove()

    def statistics(self, index: int) -> Statistics:
        """Return the statistics of a layer, in their file until they are used."""
        return Statistics.of(kept(self._place(index)))

    def _skip(self, layers: int) -> Iterator[None]:
        """Count layers that were done before an interruption."""
        yield from repeat(None, layers * len(self.blocks))

    def _embed(self) -> None:
        states = (self.model.embed(ids.to(self.model.device)) for ids, _ in self.blocks)
        deque(self._states(0).write(states), maxlen=0)

    def _forward(self, index: int, moments: LayerMoments | None = None) -> Iterator[Tensor]:
        """Yield a layer's output; what its attention reads goes to `moments`."""
        for states, counts in zip(self._states(index), self.counts, strict=True):
            yield self._through(index, states, counts, moments)

    @torch.no_grad()
    def _through(self, index: int, states: Tensor, counts: Tensor, moments: LayerMoments | None) -> Tensor:
        if moments is None:
            return self.model.layers[index](states.to(self.model.device))
        with moments.watching() as (seen, _):
            after = self.model.layers[index](states.to(self.model.device))
        moments.add(seen[0], [], counts)
        return after

    def _backward(self, index: int, moments: LayerMoments) -> Iterator[Tensor]:
        """Yield the loss's gradient with respect to a layer's input; that of its keys and values goes to `moments`."""
        batches = zip(self._states(index), self._gradients(index + 1), self.counts, strict=True)
        for states, pull, counts in batches:
            yield self._back(index, states, pull, counts, moments)

    def _back(
        self, index: int, states: Tensor, pull: Tensor, counts: Tensor, moments: LayerMoments
    ) -> Tensor:
        states = states.to(self.model.device).requires_grad_()
        with moments.watching() as (seen, stack):
            after = self.model.layers[index](states)
        down, *parts = torch.autograd.grad(after, [states, *stack], pull.to(after.device))
        moments.add(seen[0], parts, counts)
        return down

    def _gradients_of_loss(self) -> Iterator[Tensor]:
        """Yield the loss's gradient with respect to the last layer's output, for labels drawn with the seed."""
        noise = np.random.default_rng(self.seed)
        for states, counts in zip(self._states(self.n_layer), self.counts, strict=True):
            states = states.to(self.model.device).requires_grad_()
            hidden = self.model.finish(states)
            pull = self._pull(hidden, counts, torch.from_numpy(noise.random(len(counts))))
            yield torch.autograd.grad(hidden, states, pull)[0]

    def _pull(self, hidden: Tensor, counts: Tensor, noise: Tensor) -> Tensor:
        """Return the loss's gradient with respect to `hidden` (B, L, D), for labels drawn by `noise` (B L,)."""
        pull = torch.zeros_like(hidden).flatten(0, 1)
        flat = hidden.detach().flatten(0, 1)
        width = self.model.config.vocab_size
        for at in counts.nonzero()[:, 0].split(max(1, LOGITS // width)):
            rows = flat[at].requires_grad_()
            logits = self.model.logits(rows)
            error = logits.detach()  # written over, the largest tensor here
            rows_at_once = max(1, EXACT // width)
            for part, drawn in zip(error.split(rows_at_once), noise[at].split(rows_at_once), strict=True):
                part.copy_(_error(part, drawn))
            pull[at] = torch.autograd.grad(logits, rows, error)[0]
        return pull.view_as(hidden)

    def _is_kept(self, index: int) -> bool:
        return self._place(index).exists()

    def _states(self, depth: int) -> States:
        return self._file(f"states-{depth}")

    def _gradients(self, depth: int) -> States:
        return self._file(f"gradients-{depth}")

    def _file(self, name: str) -> States:
        shapes = [(ids.shape[0], ids.shape[1]) for ids, _ in self.blocks]
        weight = self.model.embed_tokens.weight
        return States(self.folder / name, shapes, weight.shape[1], weight.dtype)

    def _unwritten(self, name: str) -> Path:
        """Return a path in the folder, without the file that an interrupted run may have left there."""
        (self.folder / name).unlink(missing_ok=True)
        return self.folder / name

    def _place(self, index: int) -> Path:
        return self.folder / f"statistics-{index}"


def _error(logits: Tensor, noise: Tensor) -> Tensor:
    """Return the loss's gradient with respect to logits (T, V), for labels drawn by `noise` (T,)."""
    likely = probabilities(logits)
    label = draw(likely, noise.to(likely.device))
    likely[torch.arange(len(label), device=label.device), label] -= 1
    return likely
