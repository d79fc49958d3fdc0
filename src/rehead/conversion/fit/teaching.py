"""Converted attentions taught by those of the source, one layer at a time.

Each learns to give the output that the source's attention has at the same place of a text, from the inputs it gets
in the converted model, so that it also makes up for what the layers before it lost. In memory are a layer of each
model, the activations of one batch in it, and what Adam keeps.
"""

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rehead.attention import Attention
from rehead.checkpoint.files.deferred import held
from rehead.checkpoint.files.kept import keep, kept, kept_figures
from rehead.conversion.fit.moments import attentions
from rehead.conversion.fit.states import States
from rehead.data import IGNORE
from rehead.data.batches import Pair
from rehead.errors import InvalidInput
from rehead.model import GPT, evaluating
from rehead.stages import staged
from rehead.system.allocator import keeping_freed_memory

RATE, WARM_UP, BETAS = 4e-3, 4, (0.9, 0.95)
"""Adam's learning rate, in units of each matrix's RMS; its warm-up steps; its betas. A cosine scales all steps."""
HELD = 8
"""Every eighth window is not learned from: the errors are measured on it."""

Window = tuple[Tensor, Tensor, Tensor]
"""What an attention reads and should give, (1, L, D), and which tokens count, (L,)."""


@dataclass(frozen=True, kw_only=True)
class Taught:
    """RMS errors of an attention's output before and after it was taught, relative to the output of the source's.

    Its inputs are those it gets in the converted model, on windows that it did not learn from.
    """

    before: float
    after: float


def teach(
    source: GPT,
    result: GPT,
    which: Collection[int],
    blocks: Sequence[Pair],
    folder: Path,
    *,
    passes: int,
    seed: int = 0,
) -> dict[int, Taught]:
    """Teach the attentions of `result` in the layers `which`, in place, over a text read `passes` times.

    All matrices of an attention are trained by Adam, one window per step, in a seeded order, in float32 or better. A
    layer that does not improve keeps its weights. New weights are deferred, in `folder`, which also keeps finished
    layers: called again with the same arguments, an interrupted teaching resumes after the last of them.
    Raises InvalidInput for a text of a single window.
    """
    lessons = _Lessons(source, result, blocks, folder, passes, seed)
    order = sorted(which)
    steps = len(order) * passes * len(lessons.learned)
    with (
        keeping_freed_memory(),
        torch.no_grad(),
        evaluating(source, result),
        closing(lessons.of(order)) as work,
    ):
        for _ in staged(work, "teaching the attentions", steps, "steps"):
            pass
    return {index: lessons.found(index) for index in order}


def require_windows(blocks: Sequence[Pair]) -> None:
    """Refuse a text of a single window: teaching learns from some and measures on others."""
    if sum(len(targets) for _, targets in blocks) < 2:
        raise InvalidInput(
            "the calibration is a single window: teaching learns from some and measures on others. Give a longer "
            "text, or a smaller length."
        )


class _Lessons:
    """Both models on their way through a text, layer by layer. `of` yields after every step of Adam."""

    def __init__(
        self, source: GPT, result: GPT, blocks: Sequence[Pair], folder: Path, passes: int, seed: int
    ) -> None:
        self.models = {"source": source, "result": result}
        require_windows(blocks)
        self.blocks, self.folder, self.passes, self.seed = blocks, folder, passes, seed
        self.counts = [row for _, targets in blocks for row in targets != IGNORE]
        self.measured = range(HELD - 1, len(self.counts), HELD) or [len(self.counts) - 1]
        self.learned = [index for index in range(len(self.counts)) if index not in self.measured]

    def of(self, which: Sequence[int]) -> Generator[None]:
        """Teach one layer after the other."""
        done = [index for index in which if self._place(index).exists()]
        for index in done:
            self._use(index)
            yield from repeat(None, self.passes * len(self.learned))
        if done == which:
            return
        reached = [
            at for at in range(which[-1] + 1) if all(self._states(name, at).exists for name in self.models)
        ]
        if not reached:
            self._embed()
        for index in range(max(reached, default=0), which[-1] + 1):
            if index in which and index not in done:
                yield from self._taught(index)
                self._use(index)
            if index < which[-1]:
                self._forward(index)
            for name in ("outputs", *self.models):
                self._states(name, index).remove()

    def found(self, index: int) -> Taught:
        """Return the errors of a layer."""
        before, after = kept_figures(self._place(index))
        return Taught(before=before, after=after)

    def _embed(self) -> None:
        for name, model in self.models.items():
            _write(self._states(name, 0), (model.embed(ids.to(model.device)) for ids, _ in self.blocks))

    def _forward(self, index: int) -> None:
        """Write the next hidden states of both models."""
        for name, model in self.models.items():
            with held(model.layers[index]):
                _write(self._states(name, index + 1), self._through(model.layers[index], name, index))

    def _outputs(self, index: int) -> None:
        """Write what the source's attention gives."""
        layer = self.models["source"].layers[index]
        attention = nn.Sequential(self._norm("source", index), attentions(self.models["source"])[index])
        with held(layer):
            _write(self._states("outputs", index), self._through(attention, "source", index))

    def _through(self, module: nn.Module, name: str, index: int) -> Iterator[Tensor]:
        return (module(states.to(self.models[name].device)) for states in self._states(name, index))

    def _taught(self, index: int) -> Generator[None]:
        """Teach one layer, and keep its weights, in the model's dtype, with its errors."""
        self._outputs(index)
        result = self.models["result"]
        attention, dtype = attentions(result)[index], result.head.weight.dtype
        with held(result.layers[index]):
            read = self._reader(index)
            pupil = copy.deepcopy(attention).to(exact(dtype))
            before = _error(pupil, map(read, self.measured))
            yield from _learn(pupil, map(read, self._order(index)), self.passes * len(self.learned))
            taught = pupil.to(dtype)
            after = _error(copy.deepcopy(taught).to(exact(dtype)), map(read, self.measured))
            if not after < before:  # also if it is NaN
                taught, after = attention, before
            keep(self._place(index), dict(taught.named_parameters()), [before, after])

    def _reader(self, index: int) -> Callable[[int], Window]:
        """Return what reads a window by its number, in float32 or better."""
        states, outputs = (self._states(name, index).mapped() for name in ("result", "outputs"))
        model = self.models["result"]
        norm = self._norm("result", index)

        def read(window: int) -> Window:
            counts = self.counts[window].to(model.device)
            inputs = norm(states[window][None].to(model.device))
            expected = outputs[window][None].to(model.device)
            return inputs.to(exact(inputs.dtype)), expected.to(exact(expected.dtype)), counts

        return read

    def _norm(self, name: str, index: int) -> nn.Module:
        """Return what an attention's input goes through."""
        norm = self.models[name].layers[index].input_layernorm
        assert isinstance(norm, nn.Module)
        return norm

    def _order(self, index: int) -> list[int]:
        """Return the windows of every step: all that are learned from, in every pass."""
        noise = np.random.default_rng([self.seed, index])
        return [int(window) for _ in range(self.passes) for window in noise.permutation(self.learned)]

    def _use(self, index: int) -> None:
        """Put a layer's kept weights in its place."""
        result = self.models["result"]
        attention = attentions(result)[index]
        for name, weight in kept(self._place(index)).items():
            owner, _, leaf = name.rpartition(".")
            setattr(
                attention.get_submodule(owner),
                leaf,
                nn.Parameter(weight.to(result.device), requires_grad=False),
            )

    def _states(self, name: str, depth: int) -> States:
        shapes = [(ids.shape[0], ids.shape[1]) for ids, _ in self.blocks]
        weight = self.models["source"].embed_tokens.weight
        return States(self.folder / f"{name}-{depth}", shapes, weight.shape[1], weight.dtype)

    def _place(self, index: int) -> Path:
        return self.folder / f"taught-{index}"


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _write(states: States, batches: Iterable[Tensor]) -> None:
    if not states.exists:
        deque(states.write(batches), maxlen=0)


def _learn(pupil: Attention, windows: Iterable[Window], steps: int) -> Iterator[None]:
    """Take a step of Adam on every window."""
    matrices = [weight.requires_grad_(weight.ndim == 2) for weight in pupil.parameters()]
    groups = [
        {"params": [weight], "lr": RATE * float(weight.square().mean().sqrt())}
        for weight in matrices
        if weight.requires_grad
    ]
    optimizer = torch.optim.Adam(groups, betas=BETAS)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_share, steps=steps))
    for inputs, expected, counts in windows:
        with torch.enable_grad():
            error = (pupil(inputs) - expected)[:, counts].square().sum() / expected[:, counts].square().sum()
        error.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield


def _share(step: int, steps: int) -> float:
    """Return the share of the rate at a step, counted from 0."""
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2


def _error(pupil: Attention, windows: Iterable[Window]) -> float:
    """Return the RMS error of the outputs, relative to those expected."""
    sums = torch.zeros(2, dtype=torch.float64)
    for inputs, expected, counts in windows:
        difference = (pupil(inputs) - expected)[:, counts].double()
        expected = expected[:, counts].double()
        sums += torch.stack([difference.square().sum(), expected.square().sum()]).cpu()
    return float((sums[0] / sums[1]).sqrt())
