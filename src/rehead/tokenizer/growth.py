"""Bounds what a tokenizer.json may make of a text: how much longer, and by which patterns.

The `tokenizers` library ends the process when it has no memory for a result, and cannot be stopped while it searches.
"""

import base64
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rehead.errors import InvalidInput

MOST_STEPS = 64
MOST_GROWTH, MOST_BEFORE = 128, 1024
"""Characters that one may become, and characters put before a text; files in use stay far below both."""
LONGEST_PATTERN, MOST_NESTED = 4096, 8
"""Characters of a regular expression, and groups in groups; backtracking through 200 of them takes minutes."""
LONGEST_TOKEN, LONGEST_WORD = 65_536, 1_000
"""Characters of a token, and of a word that WordPiece takes apart."""
MOST_PIECES = 64
"""Places for a text or a special token in a template."""
INNER = ("normalizers", "pretokenizers", "decoders")
EACH = {"ByteLevel": 5, "Metaspace": 2, "BertNormalizer": 3}
"""Characters that one may become: four bytes and a blank; a blank before a word; a blank on both sides."""


def require_modest(text: str, name: str) -> None:
    """Refuse a tokenizer.json that makes gigabytes of a short text, or that may search one for ever."""
    table = json.loads(text)
    _require_modest_model(table, name)
    _require_modest_template(table.get("post_processor"), name)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(table.get(part)))
        growth, before = 1, 0
        for step in steps:
            times = _growth(step)
            growth, before = growth * times, before * times + len(step.get("prepend") or "")
        if len(steps) > MOST_STEPS:
            raise InvalidInput(f"{name}: its {part} has {len(steps):,} steps: rehead allows {MOST_STEPS}.")
        if growth > MOST_GROWTH or before > MOST_BEFORE:
            raise InvalidInput(
                f"{name}: its {part} may make a text {_shown(growth)} times as long and puts {_shown(before)} "
                f"characters before it: rehead allows {MOST_GROWTH} times and {MOST_BEFORE:,}."
            )
        for step in steps:
            if step.get("type") == "FixedLength" and step.get("length", 1) == 0:
                raise InvalidInput(f"{name}: its {part} cuts a text into parts of no length.")
            pattern = _pattern(step, "Regex") or ""
            if len(pattern) > LONGEST_PATTERN or _nested(pattern) > MOST_NESTED:
                raise InvalidInput(
                    f"{name}: its {part} has a pattern of {len(pattern):,} characters and {_nested(pattern)} groups "
                    f"in each other: rehead allows {LONGEST_PATTERN:,} and {MOST_NESTED}."
                )


def _require_modest_model(table: dict[str, Any], name: str) -> None:
    """Refuse a token of many characters, and words that a search takes minutes for."""
    model = table["model"]
    vocab = model.get("vocab") or ()
    tokens = vocab if isinstance(vocab, dict) else (token for token, _ in vocab)
    added = (token["content"] for token in table.get("added_tokens") or ())
    longest = max(map(len, chain(tokens, added)), default=0)
    if longest > LONGEST_TOKEN:
        raise InvalidInput(f"{name}: a token has {longest:,} characters: rehead allows {LONGEST_TOKEN:,}.")
    word = model.get("max_input_chars_per_word", 0) if model.get("type") == "WordPiece" else 0
    if word > LONGEST_WORD:
        raise InvalidInput(
            f"{name}: max_input_chars_per_word={_shown(word)}, whose cube it may take: rehead allows {LONGEST_WORD:,}."
        )


def _require_modest_template(step: Any, name: str) -> None:
    """Refuse a template that repeats a text, or puts very many special tokens around it."""
    for part in _steps(step, ("processors",)):
        pieces = max(len(part.get(which) or ()) for which in ("single", "pair"))
        special = part.get("special_tokens")
        n_id = sum(len(one["ids"]) for one in special.values()) if isinstance(special, dict) else 0
        if pieces > MOST_PIECES or n_id > MOST_BEFORE:
            raise InvalidInput(
                f"{name}: its template has {pieces:,} pieces and {n_id:,} ids: rehead allows {MOST_PIECES} and "
                f"{MOST_BEFORE:,}."
            )


def _steps(step: Any, inside: tuple[str, ...] = INNER) -> Iterator[dict[str, Any]]:
    """Yield the steps in order; each has been read by the library before."""
    if isinstance(step, dict):
        inner = [part for name in inside for part in step.get(name) or ()]
        if not inner:
            yield step
        for part in inner:
            yield from _steps(part, inside)


def _growth(step: dict[str, Any]) -> int:
    """Return how many characters one may become in a step."""
    if "precompiled_charsmap" in step:
        blob = base64.b64decode(step["precompiled_charsmap"] or "")
        texts = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
        return max(1, *(len(text.decode(errors="replace")) for text in texts))
    if "content" in step and "pattern" in step:
        pattern, content = _pattern(step, "String"), len(step["content"])
        return -(-content // len(pattern)) or 1 if pattern else content + 1  # a regex may match nothing
    return EACH.get(step.get("type", ""), 1)


def _pattern(step: dict[str, Any], kind: str) -> str | None:
    """Return the pattern of a step, if it is of this kind: String or Regex."""
    pattern = step.get("pattern")
    return pattern.get(kind) if isinstance(pattern, dict) else None


def _nested(pattern: str) -> int:
    """Return how many groups of a regular expression are in each other, at most."""
    depth = most = 0
    for sign in re.findall(r"[()]", re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern, flags=re.DOTALL)):
        depth = depth + 1 if sign == "(" else max(0, depth - 1)
        most = max(most, depth)
    return most


def _shown(number: int) -> str:
    return f"{number:,}" if number < 10**9 else "a thousand million"
