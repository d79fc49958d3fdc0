"""Loads PyTorch, which takes two seconds or more; on a terminal a line says so meanwhile."""

import sys

from rich.console import Console


def load_torch() -> None:
    """Import torch, beside a line on stderr that is removed afterwards; elsewhere leave that to the command."""
    console = Console(stderr=True)
    if "torch" in sys.modules or not console.is_terminal or console.is_dumb_terminal:
        return
    with console.status("loading PyTorch"):
        import torch  # noqa: F401  the command uses it
