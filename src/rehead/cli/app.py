"""The root of the command line, and what all commands share."""

import json as jsonlib
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from rehead import __version__
from rehead.cli.layout import Layout
from rehead.report.text import inert

if TYPE_CHECKING:
    import torch

Json = Annotated[bool, Parameter(name="--json", negative="", help="print one JSON document on stdout")]
Dtype = Literal["fp32", "bf16", "fp16"]
KVFormat = Literal["fp32", "bf16", "fp16", "fp8", "int8", "q8_0"]
LENGTH = "[default: the run's block size or, without a run, the model's, at most 2048]"
DEVICE = "cpu, cuda, cuda:N, or auto: cuda if the machine has it"
app = App(
    name="rehead",
    version=__version__,
    help="Change how a language model's attention heads share keys and values, and see what it costs.",
    help_format="plaintext",
    help_formatter=Layout(),
    suppress_keyboard_interrupt=False,
)


def tell(message: str) -> None:
    """Print a message on stderr; what names, paths and files put into it cannot command the terminal."""
    print(inert(f"rehead: {message}"), file=sys.stderr)


def warn(message: object) -> None:
    """Print a warning on stderr."""
    tell(f"warning: {message}")


def torch_dtype(name: Dtype) -> "torch.dtype":
    """Return torch's dtype of this name."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def shown(text: str) -> str:
    """Return `text` as it may go to stdout: as it is into a file or pipe, unable to command a terminal."""
    return inert(text) if sys.stdout.isatty() else text


def say(document: dict[str, Any], text: str, json: bool) -> None:
    """Print a result on stdout, as one JSON document or as text."""
    print(jsonlib.dumps(document) if json else shown(text))
