"""argv into one call per command. Nothing here computes; torch is imported only by what needs it.

Importing a module here enters its commands.
"""

from rehead.cli import conversion, importing, measuring, models, training
from rehead.cli.entry import main

__all__ = ["conversion", "importing", "main", "measuring", "models", "training"]
