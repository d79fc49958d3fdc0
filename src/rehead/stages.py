"""Long work says what it does and how far it is, to whoever listens: the command line shows it, a library is silent."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is being done, and how much of it: `done` of `total` (None: nobody knows) in `unit`, a plural."""

    title: str
    total: int | None
    unit: str
    done: int = 0
    state: Literal["begun", "going", "ended"] = "begun"


Listener = Callable[[Stage], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` of every stage meanwhile: when it begins, after each of its items, and when it ends.

    A stage within a stage is a part of it and not told of.
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
    """Pass `items` on as a stage; each counts its `size` once it was worked on."""
    tell = _listener.get()
    if tell is None:
        yield from items
        return
    stage = Stage(title=title, total=total, unit=unit)
    tell(stage)
    try:
        for item in items:
            yield item
            stage = replace(stage, done=stage.done + size(item), state="going")
            tell(stage)
    finally:
        tell(replace(stage, state="ended"))
