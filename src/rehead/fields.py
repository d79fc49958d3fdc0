"""Checks values against annotations: a value of another type is refused when a config is created."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from inspect import get_annotations
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from rehead.errors import ConfigError

WORDS = {
    bool: "True or False (bool)",
    int: "a whole number (int)",
    float: "a number (float)",
    str: "a text (str)",
    dict: "a table (dict)",
    list: "a list",
}


def require_types(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for a field whose value is not of its annotated type, naming field, value and type.

    None is allowed where it is the default. The message puts `prefix` before the field's name.
    """
    cls: Any = type(config)
    for name, default, kind, fits in _rules(cls):
        value = getattr(config, name)
        if not (fits(value) or (value is None and default is None)):
            optional = ", or None" if default is None or NoneType in get_args(kind) else ""
            raise ConfigError(
                f"{prefix}{name}={value!r:.80} is {_article(type(value).__name__)}: expected {_words(kind)}{optional}."
            )


@cache
def _rules(config: Any) -> list[tuple[str, Any, Any, Callable[[Any], bool]]]:
    """Return name, default, annotation and check of every field."""
    kinds = annotations(config)
    return [
        (field.name, field.default, kinds[field.name], matcher(kinds[field.name])) for field in fields(config)
    ]


@cache
def annotations(config: Any) -> dict[str, Any]:
    """Return the annotation of every field; `from __future__ import annotations` makes texts of them."""
    kinds = {field.name: field.type for field in fields(config)}
    for cls in reversed(config.__mro__):
        texts = {
            name for name, kind in get_annotations(cls).items() if isinstance(kind, str) and name in kinds
        }
        if texts:
            evaluated = get_annotations(cls, eval_str=True)
            kinds |= {name: evaluated[name] for name in texts}
    return kinds


def matcher(kind: Any) -> Callable[[Any], bool]:
    """Return a function that says whether an annotation allows a value.

    A bool is not a number; a whole number is also a float.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: True
    if origin in (Union, UnionType):
        checks = [matcher(member) for member in inner]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        return lambda value: any(type(value) is type(choice) and value == choice for choice in inner)
    if origin in (tuple, list):
        item = matcher(inner[0])
        return lambda value: isinstance(value, origin) and all(map(item, value))
    if origin is dict:
        key, item = map(matcher, inner)
        return lambda value: isinstance(value, dict) and all(key(k) and item(v) for k, v in value.items())
    if kind in (int, float):
        number = int if kind is int else (int, float)
        return lambda value: isinstance(value, number) and not isinstance(value, bool)
    return lambda value: isinstance(value, origin or kind)


def _words(kind: Any) -> str:
    """Describe an annotation in words, leaving None out."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(member) for member in get_args(kind) if member is not NoneType)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(repr, get_args(kind)))}"
    if get_origin(kind) in (tuple, list):
        return f"{_article(get_origin(kind).__name__)}, each item {_words(get_args(kind)[0])}"
    plain = get_origin(kind) or kind
    return WORDS.get(plain) or _article(plain.__name__)


def _article(name: str) -> str:
    return f"an {name}" if name[0].lower() in "aeiou" else f"a {name}"
