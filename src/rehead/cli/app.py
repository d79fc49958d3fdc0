"""The root of the command line, and what all commands share."""

import json as jsonlib
import sys
from typing import Annotated, Any

from cyclopts import App, Parameter

from rehead import __version__
from rehead.cli.layout import Layout

Json = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
DEVICE = "cpu, cuda, cuda:N, mps, or auto for the fastest available"
app = App(
    name="rehead",
    version=__version__,
    help="Change how a language model's attention heads share keys and values, and see what it costs.",
    help_format="plaintext",
    help_formatter=Layout(),
    suppress_keyboard_interrupt=False,
)


def warn(message: object) -> None:
    """Print a warning on stderr."""
    print(f"rehead: warning: {message}", file=sys.stderr)


def say(document: dict[str, Any], text: str, json: bool) -> None:
    """Print a result on stdout, as one JSON document or as text."""
    print(jsonlib.dumps(document) if json else text)
