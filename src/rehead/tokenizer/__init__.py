"""Text to ids and back, from a tokenizer.json."""

from rehead.tokenizer.kinds import KINDS
from rehead.tokenizer.opened import OpenedModel, chat_template, load_tokenizer, open_model
from rehead.tokenizer.tokenizer import FILE, Tokenizer, train

__all__ = [
    "FILE",
    "KINDS",
    "OpenedModel",
    "Tokenizer",
    "chat_template",
    "load_tokenizer",
    "open_model",
    "train",
]
