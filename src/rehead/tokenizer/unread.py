"""Tokenizers in files that rehead does not read."""

import os
from fnmatch import fnmatch
from pathlib import Path

from rehead.errors import InvalidInput

FILE = "tokenizer.json"
OTHERS = ("*.model", "tokenizer.model.*", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
MADE = "Write one there with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers."


def unread(folder: Path) -> list[str]:
    """Return the names of the tokenizers of other forms in `folder`."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [name for name in names if any(fnmatch(name, form) for form in OTHERS)]


def missing(file: Path) -> InvalidInput:
    """Return the error for a tokenizer.json that does not exist."""
    way_out = f"give a {FILE}, or a folder that has one."
    if others := unread(file.parent):
        way_out = f"rehead does not read {', '.join(others):.100}. {MADE}"
    return InvalidInput(f"no file {str(file)!r}: {way_out}")
