"""A value against the type of its option. What does not fit is refused with the rule and an example."""

from dataclasses import Field
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from rehead.errors import ConfigError

WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text, in quotes where YAML would read something else",
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
    """`value` as the `option` called `key` holds it. `where` is how the user wrote it.

    Raises ConfigError with the type in words, and an example.
    """
    kind = _kind(option)
    optional = kind is not option.type
    if value is None and optional:
        return None
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ConfigError(f"{where}: unknown choice. Use one of {', '.join(get_args(kind))}.")
        return value
    plain = get_origin(kind) or kind
    if plain is bool and type(value) is int and value in (0, 1):
        return bool(value)
    if plain is float and type(value) is int:
        return float(value)
    if type(value) is plain and (plain is not list or all(isinstance(entry, dict) for entry in value)):
        return value
    rule = f"expected {WORDS[plain]}{', or null for its default' if optional else ''}"
    raise ConfigError(f"{where}: {rule}. Write {key}={example(option)}, for example.")


def example(option: Field) -> Any:
    """A value the option may have: its default, where that is one."""
    if option.default is not None:
        return option.default
    kind = _kind(option)
    return get_args(kind)[0] if get_origin(kind) is Literal else EXAMPLES[get_origin(kind) or kind]


def _kind(option: Field) -> Any:
    """The type of its values, None aside."""
    parts = get_args(option.type)
    return parts[0] if NoneType in parts else option.type
