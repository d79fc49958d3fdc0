"""Progress of long work, reported to a listener: the command line shows it, the library is silent."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A piece of long work: `done` of `total` items (None if unknown), counted in `unit`, a plural."""

    title: str
    total: int | None
    unit: str
    done: int = 0
    state: Literal["begun", "going", "ended"] = "begun"


Listener = Callable[[Stage], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report every stage within the block to `listener`: its begin, each of its items, and its end.

    A stage within a stage is part of it and is not reported.
    """
    depth = 0

    def outermost(stage: Stage) -> None:
        nonlocal depth
        depth += stage.state == "begun"
        if depth == 1:
            listener(stage)
        depth -= stage.state == "ended"

    token = _listener.set(outermost)
    try:
        yield
    finally:
        _listener.reset(token)


def staged(
    items: Iterable[T], title: str, total: int | None, unit: str, size: Callable[[T], int] = lambda _: 1
) -> Iterator[T]:
    """Yield `items` as a stage; each counts its `size` once it has been processed."""
    report = _listener.get()
    if report is None:
        yield from items
        return
    stage = Stage(title=title, total=total, unit=unit)
    report(stage)
    try:
        for item in items:
            yield item
            stage = replace(stage, done=stage.done + size(item), state="going")
            report(stage)
    finally:
        report(replace(stage, state="ended"))
