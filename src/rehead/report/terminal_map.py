"""Attention maps on a terminal: a cell per weight, darker for larger weights."""

import sys
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

BOUNDS = (0.01, 0.1, 0.3, 0.6)
BLOCKS, LETTERS = "·░▒▓█", ".:+*#"
"""One sign per band of weights between the bounds; ASCII if the terminal has no block characters."""
LONGEST = 14
"""Characters of a row's label."""


def render(
    labels: Sequence[str], weights: Float[Tensor, "L L"], columns: int, equal: Sequence[bool] = ()
) -> list[str]:
    """Return the lines of a map of as many first tokens as fit `columns` characters, with numbers if they fit.

    Rows are queries. A weight of exactly 0, which is masked, is blank. The first rows are marked = if they are
    `equal` to those of another text.
    """
    signs = BLOCKS if _can_say(BLOCKS) else LETTERS
    names = [_fit(label, LONGEST) for label in labels]
    margin = 6 + max(map(len, names))
    numbers = margin + 8 * len(labels) <= columns
    width = 8 if numbers else 2
    shown = min(len(labels), max((columns - margin) // width, 1))
    lines = [" " * margin + "".join(_heads(names[:shown], width))]
    for i, row in enumerate(weights[:shown, :shown].tolist()):
        cells = (_cell(weight, signs, numbers) for weight in row)
        mark = "=" if i < len(equal) and equal[i] else " "
        lines.append(f"{i:>4}{mark}{names[i]:<{margin - 5}}{''.join(cells)}".rstrip())
    bands = [f"{sign} <{bound}" for sign, bound in zip(signs, BOUNDS, strict=False)]
    lines.append(" " * margin + "  ".join([*bands, f"{signs[-1]} more"]))
    if any(equal):
        lines.append(" " * margin + "= the same row as in the first text")
    if shown < len(labels):
        lines.append(" " * margin + f"the first {shown} of {len(labels)} tokens; --html shows all")
    return lines


def _heads(names: Sequence[str], width: int) -> list[str]:
    """Return the head of every column: its label if all fit, else cut or, in narrow columns, every fifth index."""
    if all(len(name) < width for name in names):
        return [f"{name:>{width}}" for name in names]
    if width > 2:
        return [f"{_fit(name, width - 1):>{width}}" for name in names]
    return [f"{j % 100:>2}" if j % 5 == 0 else "  " for j in range(len(names))]


def _cell(weight: float, signs: str, numbers: bool) -> str:
    if weight == 0:
        return " " * (8 if numbers else 2)
    sign = signs[sum(weight >= bound for bound in BOUNDS)]
    return f" {sign}{weight:.4f}" if numbers else sign * 2


def _fit(label: str, width: int) -> str:
    text = label if _can_say(label) else label.replace("·", "_").encode("ascii", "backslashreplace").decode()
    return text if len(text) <= width else text[: width - 1] + "~"


def _can_say(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
