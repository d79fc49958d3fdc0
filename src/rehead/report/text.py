"""Makes untrusted strings (names, prompts, tokens, generated text) safe to show."""

import textwrap
import unicodedata
from collections.abc import Iterable

from rich.console import Console

LONGEST, LONGEST_LABEL = 200, 24
"""Characters of a text, and of a token's label."""
SHOWN = {"\n", "\t"}
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Control and format characters, such as those that reverse the direction of what follows."""
TURNS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Classes of characters that set the direction of what follows."""
SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}
"""Blanks of a label."""


def sanitise(text: object, most: int = LONGEST) -> str:
    """Return `text` with invisible characters escaped, cut after `most` characters with a count of the rest."""
    whole = str(text)
    rest = len(whole) - most
    shown = "".join(
        f"\\u{ord(letter):04x}" if unicodedata.category(letter) in HIDDEN and letter not in SHOWN else letter
        for letter in whole[:most]
    )
    return f"{shown} … and {rest:,} more characters" if rest > 0 else shown


def inert(text: str) -> str:
    """Return `text` with all that would command a terminal, or reverse the direction of what follows, escaped."""
    return "".join(letter if _is_inert(letter) else f"\\u{ord(letter):04x}" for letter in text)


def _is_inert(letter: str) -> bool:
    if letter in SHOWN or letter.isprintable():
        return True
    return unicodedata.category(letter) not in {"Cc", "Cs"} and unicodedata.bidirectional(letter) not in TURNS


def token_labels(tokens: Iterable[str]) -> list[str]:
    """Return a short label per token: blanks as signs, unprintable characters and line breaks escaped."""
    return [_label(token) for token in tokens]


def _label(token: str) -> str:
    text = "".join(map(_visible, token[: LONGEST_LABEL + 1]))
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _visible(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    hidden = unicodedata.category(letter)[0] in "CZ"  # controls, formats (bidi), surrogates, separators
    return letter.encode("unicode_escape").decode() if hidden else letter


def wrapped(text: str, console: Console) -> str:
    """Wrap each line of `text` to a terminal's width, with its own indent; leave it as it is elsewhere."""
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(
            textwrap.fill(line, console.width, subsequent_indent=indent, break_on_hyphens=False) or line
        )
    return "\n".join(lines)
