"""Lays out help at any width: names on the left, meanings on the right or, in narrow terminals, below."""

import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

INDENT, GAP = 2, 2
LONGEST_NAME = 30
"""A longer name gets a line of its own."""
NARROW = 60
"""Characters per line; in a narrower terminal every meaning is below its name."""
SILENT = ("False", "()", "(1,)")
"""Defaults that are not shown, or described in the help text."""


class Layout:
    """Prints help for cyclopts; implements its `HelpFormatter`."""

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        """Print one panel: the parameters of a command, or the list of commands."""
        show(console, str(panel.title), [(_name(entry), _meaning(entry)) for entry in panel.entries])

    def render_usage(self, console: "Console", options: "ConsoleOptions", usage: Any) -> None:
        """Print the usage line."""
        words = " ".join(str(usage or "").replace("[ARGS...]", "[GROUP.KEY=VALUE ...]").split())
        _print(console, textwrap.wrap(f"Usage: {words}", _width(console), subsequent_indent="       "))

    def render_description(self, console: "Console", options: "ConsoleOptions", description: Any) -> None:
        """Print paragraphs, wrapped to the width, and indented examples as they are."""
        text = str(getattr(description, "primary_renderable", None) or "")
        for paragraph in re.split(r"\n\s*\n", text.rstrip()):
            if paragraph:
                console.print()
                _print(console, _wrapped(paragraph, _width(console)))


def show(console: "Console", title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a title, then each name with its meaning."""
    rows = list(rows)
    if rows:
        console.print()
        console.print(f"{title}:", style="bold", markup=False, highlight=False)
        names = [len(name) for name, _ in rows if len(name) <= LONGEST_NAME]
        width = _width(console)
        left = 2 * INDENT if width < NARROW else INDENT + max(names, default=0) + GAP
        for name, meaning in rows:
            _print(console, _entry(name, meaning, left, width))


def _entry(name: str, meaning: str, left: int, width: int) -> Iterator[str]:
    lines = textwrap.wrap(meaning, max(width - left, 20), break_on_hyphens=False)
    begin = " " * INDENT + name
    if lines and len(begin) + GAP <= left:
        yield begin.ljust(left) + lines.pop(0)
    else:
        yield from textwrap.wrap(begin, width, subsequent_indent=" " * 2 * INDENT, break_on_hyphens=False)
    yield from (" " * left + line for line in lines)


def _wrapped(paragraph: str, width: int) -> Iterator[str]:
    if not paragraph.startswith(" "):
        yield from textwrap.wrap(paragraph, width, break_on_hyphens=False)
        return
    for line in paragraph.splitlines():
        yield from textwrap.wrap(
            line, width, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False
        )


def _name(entry: "HelpEntry") -> str:
    """Return what a user types: MODEL, or --context INT."""
    return entry.positional_label or " ".join(entry.display_labels_with_metavar)


def _meaning(entry: "HelpEntry") -> str:
    words = [str(getattr(entry.description, "primary_renderable", None) or "")]
    words += [f"[choices: {', '.join(entry.choices)}]"] if entry.choices else []
    words += [f"[default: {entry.default}]"] if entry.default not in (None, *SILENT) else []
    words += ["[required]"] if entry.required else []
    return " ".join(filter(None, words))


def _width(console: "Console") -> int:
    return max(console.width, 20)


def _print(console: "Console", lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
