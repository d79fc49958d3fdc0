"""Where rehead keeps files that are shared by all runs on a machine."""

from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of downloads and compiled kernels, ~/.cache/rehead, without creating it."""
    return Path.home() / ".cache" / "rehead"
