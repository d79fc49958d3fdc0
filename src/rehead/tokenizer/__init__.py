"""Text to ids and back, from a tokenizer.json."""

from rehead.tokenizer.kinds import KINDS
from rehead.tokenizer.opened import OpenedModel, load_tokenizer, open_model
from rehead.tokenizer.tokenizer import Tokenizer, train
from rehead.tokenizer.unread import FILE

__all__ = ["FILE", "KINDS", "OpenedModel", "Tokenizer", "load_tokenizer", "open_model", "train"]
