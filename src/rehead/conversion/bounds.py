"""Bounds on the values of a certificate, which may come from somebody else's folder."""

import math
from typing import Any

DEEPEST = 32
"""Levels of nested tables and lists, at most; the config of a model has a dozen."""


def bounded(value: Any, depth: int = DEEPEST) -> Any:
    """Return a value of JSON. Raises ValueError if it is nested deeper than `depth`, or for a number out of bounds.

    Integers must fit in 64 bits and floats be finite, so that figures computed from them can be written, too.
    """
    if isinstance(value, dict | list):
        if not depth:
            raise ValueError(f"more than {DEEPEST} tables and lists within one another")
        for one in value.values() if isinstance(value, dict) else value:
            bounded(one, depth - 1)
    elif isinstance(value, int | float) and not abs(value) < (2**63 if isinstance(value, int) else math.inf):
        raise ValueError(f"the number {value!s:.40} is out of bounds")
    return value
