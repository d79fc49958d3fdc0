"""Strings of unknown origin (names, prompts, generated text), made fit to be shown."""

import textwrap
import unicodedata

from rich.console import Console

LONGEST = 200
SHOWN = {"\n", "\t"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Control and format characters, such as those that turn the direction of what follows."""


def harmless(text: object, most: int = LONGEST) -> str:
    """`text` with invisible characters written out, and cut after `most` characters with a count of the rest."""
    kept = str(text)
    rest = len(kept) - most
    shown = "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in HIDDEN and letter not in SHOWN else letter
        for letter in kept[:most]
    )
    return f"{shown} … and {rest:,} more characters" if rest > 0 else shown


def wrapped(text: str, console: Console) -> str:
    """`text` broken between words to a terminal's width, each line indented as its first; elsewhere as it is."""
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(
            textwrap.fill(line, console.width, subsequent_indent=indent, break_on_hyphens=False) or line
        )
    return "\n".join(lines)
