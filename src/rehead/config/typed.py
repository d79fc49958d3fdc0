"""Checks a value against the type of its option, and refuses it with the rule and an example."""

from dataclasses import Field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rehead.errors import ConfigError
from rehead.fields import matcher

WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text, in quotes if YAML would read something else",
    dict: "a table",
    list: "a list of tables",
}
EXAMPLES: dict[type, Any] = {
    bool: True,
    int: 3,
    float: 0.1,
    str: "text",
    dict: "'{rope_type: linear, factor: 2}'",
    list: "'[{window: 64}, {}]'",
}


def checked(option: Field, value: Any, key: str, where: str) -> Any:
    """Return `value` in the type of the `option` called `key`. `where` is what the user wrote.

    Raises ConfigError with the type in words and an example.
    """
    kind = _kind(option)
    plain = get_origin(kind) or kind
    items = get_args(kind)[0] if plain is list else None
    choices = get_args(items) if get_origin(items) is Literal else ()
    if choices and value == "none" and kind is not option.type:
        return None
    if isinstance(value, str) and value in choices:  # one stands for a list of it
        value = [value]
    if type(value) is int and (plain is float or (plain is bool and value in (0, 1))):
        value = plain(value)
    if matcher(option.type)(value):
        return value
    if plain is Literal:
        raise ConfigError(f"{where}: unknown choice. Use one of {', '.join(get_args(kind))}.")
    if choices:
        raise ConfigError(
            f"{where}: unknown choice. Use one of {', '.join(choices)}, several as [{', '.join(choices[:2])}]"
            f"{', or none' if kind is not option.type else ''}."
        )
    rule = f"expected {WORDS[plain]}{', or null for its default' if kind is not option.type else ''}"
    raise ConfigError(f"{where}: {rule}. Write {key}={example(option)}, for example.")


def example(option: Field) -> Any:
    """Return a valid value of the option: its default, unless that is None."""
    if option.default is not None:
        return option.default
    kind = _kind(option)
    if get_origin(kind) is list and get_origin(get_args(kind)[0]) is Literal:
        kind = get_args(kind)[0]
    return get_args(kind)[0] if get_origin(kind) is Literal else EXAMPLES[get_origin(kind) or kind]


def _kind(option: Field) -> Any:
    """Return the type of the option's values, leaving None out."""
    parts = get_args(option.type)
    return parts[0] if NoneType in parts else option.type
