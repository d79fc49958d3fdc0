"""Knows the errors of work that had not enough memory; imports no torch."""

import re

from rehead.errors import OutOfMemory

ERRORS = re.compile("out of memory|can't allocate memory|not enough memory|Storage size calculation")
"""torch's messages: not every device has an exception class for it."""
WANTED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)


def as_out_of_memory(error: Exception) -> OutOfMemory | None:
    """Return an error of Python, torch or a device for lack of memory in rehead's words; None for any other."""
    if not (isinstance(error, MemoryError) or ERRORS.search(str(error))):
        return None
    wanted = WANTED.search(str(error))
    what = f"out of memory{f' ({wanted[1]} more were needed)' if wanted else ''}"
    return OutOfMemory(f"{what}: use a smaller model or batch, or fewer tokens.")
