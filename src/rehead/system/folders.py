"""Where rehead keeps what it makes once per machine."""

from pathlib import Path


def cache_folder() -> Path:
    """Downloads and compiled kernels: ~/.cache/rehead. Not made here."""
    return Path.home() / ".cache" / "rehead"
