"""Turns errors about a command line into sentences with the words that were typed."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args, get_origin

from cyclopts import CycloptsError
from cyclopts.exceptions import (
    ArgumentOrderError,
    CoercionError,
    ConsumeMultipleError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from rehead.registry import nearest

TAKING_FLAGS = ("train", "heal", "study")
"""Commands with options of a run, group.key=value."""
KINDS: dict[type | None, str] = {int: "a whole number", float: "a number"}


def worded(error: CycloptsError, argv: Sequence[str]) -> str:
    """Return one sentence for an error of cyclopts, with options named as they are typed."""
    command = argv[0]
    match error:
        case UnusedCliTokensError(unused_tokens=[word, *_]) | UnknownCommandError(unused_tokens=[word, *_]):
            return f"unexpected argument {word!r}."
        case ArgumentOrderError(token=word):
            return f"unexpected argument {word!r}."
        case ConsumeMultipleError():
            return f"{error.keyword} needs a number."
        case MissingArgumentError(argument=argument) if argument is not None:
            name, meaning = argument.name, re.sub(r" ?\[default.*", "", argument.parameter.help or "")
            if argument.field_info.is_positional:
                return f"{command} needs {name.removeprefix('--').upper()}: {meaning}."
            typed = any(word.partition("=")[0] == name for word in argv)
            return f"{name} needs a value: {meaning}." if typed else f"{command} needs {name}: {meaning}."
        case RepeatArgumentError(token=token):
            return f"{token.keyword} is given twice. Leave one out."
        case UnknownOptionError(token=token):
            options = [
                name
                for argument in error.argument_collection
                for name in argument.names
                if name.startswith("--")
            ]
            word = token.keyword or token.value
            from rehead.config.flags import of_a_run  # needs PyYAML, which most commands do without

            if command in TAKING_FLAGS and (like := of_a_run(word.removeprefix("--").replace("-", "_"))):
                return f"unknown option {word!r}. Did you mean {like}?"
            return f"unknown option {word!r}.{nearest(word, options)}"
        case CoercionError(token=token, target_type=kind) if token is not None:
            if get_origin(kind) is Literal:
                return (
                    f"{token.keyword} {token.value} is unknown.{nearest(token.value, list(get_args(kind)))}"
                )
            if kind is bool:
                return f"{token.keyword} takes no value. Leave out {token.value!r}."
            return f"{token.keyword} {token.value}: expected {KINDS.get(kind, 'another value')}."
    return str(error)


def as_typed(message: str, argv: Sequence[str]) -> str:
    """Replace `max_new_tokens=-1` in a message by `--max-new-tokens -1`, if that was typed."""
    for word, after in pairwise([*argv, ""]):
        option, _, value = word.partition("=")
        value = value or after
        if not (option.startswith("--") and value):
            continue
        forms = {value, repr(value)}
        for number in (int, float):
            try:
                forms.add(str(number(value)))
            except ValueError:
                continue
        name = option.removeprefix("--").replace("-", "_")
        names = "|".join(
            map(re.escape, (name, name.removesuffix("s"), f"{name}_size"))
        )  # of one of several; --batch
        pattern = rf"(?<![\w.])(?:{names})=(?:{'|'.join(map(re.escape, forms))})(?![\w-]|\.\d)"
        typed = f"{option} {value}"
        message = re.sub(pattern, typed.replace("\\", r"\\"), message)
    return message
