"""How the heads of a language model share keys and values: train, convert, measure, hand over.

Names are loaded when first used, so that importing rehead for its command line needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rehead.checkpoint import load, save
    from rehead.conversion import convert
    from rehead.generation import generate

_HOMES = {
    "convert": "rehead.conversion",
    "generate": "rehead.generation",
    "load": "rehead.checkpoint",
    "save": "rehead.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rehead' has no attribute {name!r}")


__all__ = ["__version__", "convert", "generate", "load", "save"]
