"""Registries: entries of one kind, looked up by name."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, Generic, TypeVar

from rehead.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to entries of one `kind`, in order of registration."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, *names: str) -> Callable[[T], T]:
        """Return a decorator that registers an entry under each of `names`.

        An entry that is defined again, as by a cell of a notebook, replaces the former one. Raises ConfigError for
        another entry of a name that is taken.
        """

        def register(entry: T) -> T:
            for name in names:
                if name in self._entries and _defined(self._entries[name]) != _defined(entry):
                    raise ConfigError(
                        f"{self.kind} {name!r} is registered twice. Give this one another name."
                    )
            self._entries.update(dict.fromkeys(names, entry))
            return entry

        return register

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        raise ConfigError(f"unknown {self.kind} {name!r}.{nearest(name, self)}")

    def name_of(self, entry: T) -> str:
        """Return the first name `entry` was registered under. Raises ConfigError if it is not registered."""
        for name, known in self._entries.items():
            if known is entry:
                return name
        raise ConfigError(
            f"{getattr(entry, '__name__', entry)!s:.80} is not registered as a {self.kind}: register it with `add`; if "
            "it was defined again since, build what holds it anew."
        )

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)


def _defined(entry: Any) -> tuple[str, str]:
    """Return where a class or function, or the class of an instance, is defined."""
    kind = entry if hasattr(entry, "__qualname__") else type(entry)
    return kind.__module__, kind.__qualname__


def nearest(name: str, known: "Registry[T] | list[str]") -> str:
    """Return the end of an "unknown ..." message: the nearest known name, then all of them."""
    swapped = [one for one in known if sorted(one) == sorted(name)]
    near = swapped or get_close_matches(name, list(known), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Known: {', '.join(known)}."
