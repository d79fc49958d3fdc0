"""Registries: entries of one kind, looked up by name."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Generic, TypeVar

from rehead.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to entries of one `kind`, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an entry under each of `names`."""

        def register(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"{self.kind} {name!r} is registered twice"
                self._entries[name] = entry
            return entry

        return register

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        raise ConfigError(f"unknown {self.kind} {name!r}.{nearest(name, self)}")

    def name_of(self, entry: T) -> str:
        """Return the first name `entry` was registered under."""
        return next(name for name, known in self._entries.items() if known is entry)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def nearest(name: str, known: "Registry[T] | list[str]") -> str:
    """Return the end of an "unknown ..." message: the nearest known name, then all of them."""
    swapped = [one for one in known if sorted(one) == sorted(name)]
    near = swapped or get_close_matches(name, list(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(known)}."
