"""The prompt of a study's samples, and a note on characters of it that the vocabulary lacks."""

from collections.abc import Mapping, Sequence

from rehead.errors import InvalidInput
from rehead.tokenizer import Tokenizer

MOST = 10
"""Characters that a note names."""


def unknown_characters(tokenizer: Tokenizer, prompt: str) -> list[str]:
    """Return the characters of `prompt` that cannot be encoded, each once; empty if the prompt can."""
    if _encodes(tokenizer, prompt):
        return []
    return [letter for letter in dict.fromkeys(prompt) if not _encodes(tokenizer, letter)] or [prompt]


def prompt_note(prompt: str | None, unknown: Mapping[str, Sequence[str]]) -> str | None:
    """Return a sentence on variants whose samples ignore the prompt; None if there are none.

    `unknown` has the characters that cannot be encoded, by variant.
    """
    names = [name for name, letters in unknown.items() if letters]
    if not names:
        return None
    letters = list(dict.fromkeys(letter for name in names for letter in unknown[name]))
    which = "" if len(names) == len(unknown) else f" of {', '.join(names)}"
    rest = f" and {len(letters) - MOST} more characters" if len(letters) > MOST else ""
    return (
        f"the prompt {prompt!r:.80} has {', '.join(map(repr, letters[:MOST]))}{rest}, which the vocabulary lacks: "
        f"samples{which} continue the validation text instead"
    )


def _encodes(tokenizer: Tokenizer, text: str) -> bool:
    try:
        tokenizer.encode(text)
    except InvalidInput:
        return False
    return True
