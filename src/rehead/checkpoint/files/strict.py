"""Reads files that somebody else wrote: regular ones, of limited size, JSON as strict parsers take it."""

import json
import math
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rehead.errors import InvalidInput

MOST_TABLES = 10**6
"""Brackets in a JSON text, at most: an empty table takes 64 bytes of memory and three in the file."""
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def strict_json(path: Path, largest: int) -> Any:
    """Read a JSON file of at most `largest` bytes. Raises InvalidInput for a key that appears twice."""
    text = text_of(path, largest)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error!s:.200}. Put a whole copy of it there.") from error


def parse_json(text: str, whole: Callable[[str], int] = int) -> Any:
    """Return the value of a JSON text. Raises ValueError for what strict parsers refuse, or that takes much memory.

    That is a key that appears twice, a number beyond float64, half a surrogate pair, a million tables and lists.
    """
    require_few_tables(text)
    found = json.loads(
        text, object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite, parse_int=whole
    )
    if SURROGATE.search(text):
        json.dumps(found, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return found


def require_few_tables(text: str) -> None:
    """Raise ValueError for a JSON text with more tables and lists than any file in use has."""
    if (n_table := text.count("{") + text.count("[")) > MOST_TABLES:
        raise ValueError(f"{n_table:,} tables and lists, more than {MOST_TABLES:,}")


def text_of(path: Path, largest: int) -> str:
    """Read a text file of at most `largest` bytes."""
    require_regular(path)
    try:
        if path.stat().st_size > largest:
            raise InvalidInput(f"{path} has more than {largest:,} bytes, the limit for such a file.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}: expected a model folder with that file.") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path} is not text in UTF-8. Put a whole copy of it there.") from error


def require_regular(path: Path) -> None:
    """Refuse a file that would block or never end (a pipe, a device), and a link out of the folder.

    The Hugging Face cache stores files under blobs/ and links to them from snapshots/; these links are allowed.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {getattr(error, 'strerror', error)}: expected a file.") from error
    if not stat.S_ISREG(mode):
        raise InvalidInput(f"{path} is not a regular file: put the file itself there.")
    if path.is_symlink():
        real, parent = path.resolve(), path.parent.resolve()
        cached = real.parent.name == "blobs" and parent.parent.name == "snapshots"
        if real.parent != parent and not (cached and real.parent.parent == parent.parent.parent):
            raise InvalidInput(f"{path} is a link out of its folder: put the file itself there.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key appears twice")
    return table


def natural(text: str) -> int:
    """Return a whole number of a header, which is written without a sign."""
    if text.startswith("-"):
        raise ValueError(f"{text:.40} has a sign")
    return int(text)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is not a number that float64 can hold")
    return number
