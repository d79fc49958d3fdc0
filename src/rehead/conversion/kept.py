"""Takes steps on layers, several at a time in processes of their own; each result is in a file that outlives them."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rehead.checkpoint.files.deferred import materialise
from rehead.checkpoint.files.kept import keep, kept, kept_figures
from rehead.checkpoint.files.writing import write_weights
from rehead.conversion.base import Converted, Statistics, Step, Weights
from rehead.conversion.unfinished import digest
from rehead.system.aside import discard
from rehead.system.workers import spread


@dataclass(frozen=True, kw_only=True)
class Order:
    """A step to take on the layer `index`, as one of its `turn`; weights and statistics may be deferred.

    The step is taken in float64; its result has `dtype`.
    """

    turn: int
    index: int
    step: Step
    method: str
    weights: Weights
    seen: Statistics
    dtype: torch.dtype

    def take(self) -> Converted:
        """Take the step in memory, in one thread: the last bits of LAPACK's results depend on how many there are."""
        weights = {name: materialise(weight).double() for name, weight in self.weights.items()}
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            done = self.step.conversion.convert(
                weights, self.step.source, self.step.result, self.seen.in_memory(), self.method
            )
        finally:
            torch.set_num_threads(threads)
        return replace(done, weights={name: weight.to(self.dtype) for name, weight in done.weights.items()})


class Kept:
    """A folder of the layers of one conversion, kept as they are done, by `n_process` processes."""

    def __init__(self, folder: Path, n_process: int = 1) -> None:
        self.folder, self.n_process = folder, n_process

    @classmethod
    def only(cls, scratch: Path, made_of: object, n_process: int) -> "Kept":
        """Return the folder in `scratch` for layers that are made of this, JSON; remove those of other layers."""
        place = scratch / f"layers-{digest(made_of)}"
        for other in set(scratch.glob("layers-*")) - {place}:
            discard(other)
        return cls(place, n_process)

    def take(self, orders: Sequence[Order]) -> Iterator[tuple[int, Converted]]:
        """Yield each layer's index and its result, deferred; results of an earlier process are not computed again."""
        self.folder.mkdir(exist_ok=True)
        missing = list[Order]()
        for order in orders:
            if self._place(order).exists():
                yield order.index, _read(self._place(order))
            else:
                missing.append(order)
        if self.n_process == 1 or len(missing) < 2:
            for order in missing:
                _write(order.take(), self._place(order))
                yield order.index, _read(self._place(order))
        else:
            for order in spread(_work, map(self._given, missing), self.n_process):
                yield order.index, _read(self._place(order))

    def has(self, turn: int, index: int) -> bool:
        """Whether the result of a layer's step is kept."""
        return (self.folder / f"{turn}-{index}").exists()

    def _place(self, order: Order) -> Path:
        return self.folder / f"{order.turn}-{order.index}"

    def _given(self, order: Order) -> "_Given":
        """Write what a process needs for a layer to files, one tensor at a time."""
        place = self.folder / f"given-{order.turn}-{order.index}"
        shutil.rmtree(place, ignore_errors=True)
        for name, tensors in (("weights", order.weights), ("seen", order.seen.tensors())):
            (place / name).mkdir(parents=True)
            write_weights(place / name, tensors)
        return _Given(place, replace(order, weights={}, seen=Statistics()), self._place(order))


@dataclass(frozen=True)
class _Given:
    """An order whose tensors are in the files of `folder`; the result belongs to `place`."""

    folder: Path
    order: Order
    place: Path


def _work(given: _Given) -> Order:
    """Execute an order in this process; return it without tensors."""
    weights, seen = (kept(given.folder / name) for name in ("weights", "seen"))
    whole = replace(given.order, weights=weights, seen=Statistics.of(seen))
    _write(whole.take(), given.place)
    shutil.rmtree(given.folder)
    return given.order


def _write(done: Converted, place: Path) -> None:
    keep(place, done.weights, [done.lost, done.residual])


def _read(place: Path) -> Converted:
    lost, residual = kept_figures(place)
    return Converted(weights=kept(place), lost=lost, residual=residual)
