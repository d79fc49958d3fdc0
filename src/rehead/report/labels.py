"""Tokens as labels: untrusted text made visible, short and harmless."""

import unicodedata
from collections.abc import Iterable

LONGEST = 24
SIGNS = {" ": "·", "\n": "↵", "\t": "⇥"}


def labels(tokens: Iterable[str]) -> list[str]:
    """A label per token: blanks as signs, what does not print or turns the line as its escape."""
    return [_label(token) for token in tokens]


def _label(token: str) -> str:
    text = "".join(map(_visible, token[: LONGEST + 1]))
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _visible(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    hidden = unicodedata.category(letter)[0] in "CZ"  # controls, formats (bidi), surrogates, separators
    return letter.encode("unicode_escape").decode() if hidden else letter
