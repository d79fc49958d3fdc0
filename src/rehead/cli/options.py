"""The help of every option of `rehead train`, read from the source code of the options, without torch."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Group

import rehead
from rehead.cli.layout import show

if TYPE_CHECKING:
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

GROUPS = ("RunOptions", "rehead.config.options")
KINDS = {"int": "INT", "float": "NUMBER", "bool": "BOOL", "str": "TEXT", "dict": "TABLE", "list": "LIST"}


@dataclass(frozen=True)
class Option:
    """One field of the options of a run.

    `default` is the value in the source or, if that is None, what the string below it gives:
    "number of layers [default: 6; rnn: 1]".
    """

    group: str
    name: str
    kind: str
    choices: tuple[str, ...]
    default: str
    meaning: str


def read_options() -> list[Option]:
    """Return all options, group by group, in the order of the source."""
    return [
        _option(group.target.id, field, meaning, module)
        for group, _ in _fields(*GROUPS)
        for module in [_home(_name(group.annotation), GROUPS[1])]
        for field, meaning in _fields(_name(group.annotation), module)
        if isinstance(group.target, ast.Name)
    ]


def _show(console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
    """Print the options of every group; cyclopts would print only that there are flags."""
    every = read_options()
    for group in dict.fromkeys(option.group for option in every):
        show(
            console,
            f"{group.capitalize()} options",
            [_row(option) for option in every if option.group == group],
        )


OPTIONS = Group("Options", help_formatter=_show)


def _row(option: Option) -> tuple[str, str]:
    choices = f"[choices: {', '.join(option.choices)}]" if option.choices else ""
    words = (option.meaning, choices, f"[default: {option.default}]")
    return f"{option.group}.{option.name}={option.kind}", " ".join(filter(None, words))


def _option(group: str, field: ast.AnnAssign, meaning: str, module: str) -> Option:
    assert isinstance(field.target, ast.Name)
    assert field.value is not None
    meaning, _, otherwise = meaning.removesuffix("]").partition(" [default: ")
    default = ast.literal_eval(field.value)
    kind = _alias(field.annotation, module)
    words = ast.unparse(kind)
    choices = tuple(re.findall(r"'([\w-]+)'", words)) if re.match(r"(list\[)?Literal", words) else ()
    return Option(
        group=group,
        name=field.target.id,
        kind="CHOICE" if words.startswith("Literal") else KINDS[re.split(r"\W", words)[0]],
        choices=choices,
        default=otherwise if default is None else str(default),
        meaning=meaning,
    )


def _fields(name: str, module: str) -> Iterator[tuple[ast.AnnAssign, str]]:
    """Yield the fields of a class, each with the string below it."""
    (cls,) = (node for node in _source(module).body if isinstance(node, ast.ClassDef) and node.name == name)
    for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            text = after.value if isinstance(after, ast.Expr) else None
            yield field, " ".join(str(text.value).split()) if isinstance(text, ast.Constant) else ""


def _alias(annotation: ast.expr, module: str) -> ast.expr:
    """Return `int` for `int | None`, and the Literal that a name like Layout stands for."""
    if isinstance(annotation, ast.BinOp):
        annotation = annotation.left
    if not isinstance(annotation, ast.Name) or annotation.id in KINDS:
        return annotation
    for node in _source(_home(annotation.id, module)).body:
        if isinstance(node, ast.Assign) and _name(node.targets[0]) == annotation.id:
            return node.value
    raise AssertionError(f"{module}: {annotation.id} is not a name for a Literal")


def _home(name: str, module: str) -> str:
    """Return the module that defines a name used in `module`."""
    for node in _source(module).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return str(node.module)
    return module


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


@cache
def _source(module: str) -> ast.Module:
    place = Path(rehead.__file__).parents[1] / Path(*module.split("."))
    return ast.parse(place.with_suffix(".py").read_text(encoding="utf-8"))
