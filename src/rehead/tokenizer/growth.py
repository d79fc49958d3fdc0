"""How much longer a tokenizer.json makes a text before it is cut into tokens, or after."""

import json
from typing import Any

from rehead.errors import InvalidInput

MOST_GROWTH, MOST_BEFORE = 64, 1024
"""Characters that one may become, and characters put before a text; files in use stay far below both."""


def require_modest(text: str, name: str) -> None:
    """Refuse a tokenizer.json whose replacements, one after the other, make gigabytes of a short text.

    The `tokenizers` library ends the process when it has no memory for the result.
    """
    table = json.loads(text)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        growth, before = _growth(table.get(part))
        if growth > MOST_GROWTH or before > MOST_BEFORE:
            raise InvalidInput(
                f"{name}: its {part} may make a text {growth:,} times as long and puts {before:,} characters before "
                f"it: rehead allows {MOST_GROWTH} times and {MOST_BEFORE:,}."
            )


def _growth(step: Any) -> tuple[int, int]:
    """Return how many characters one may become, and how many are put before a text."""
    if not isinstance(step, dict):
        return 1, 0
    growth, before = 1, 0
    for name in ("normalizers", "pretokenizers", "decoders"):
        for inner in step.get(name) or ():
            times, more = _growth(inner)
            growth, before = growth * times, before * times + more
    if "content" in step and "pattern" in step:
        pattern = step["pattern"].get("String") if isinstance(step["pattern"], dict) else None
        content = len(step["content"])
        growth *= -(-content // len(pattern)) or 1 if pattern else content + 1  # a regex may match nothing
    return growth, before + len(step.get("prepend") or "")
