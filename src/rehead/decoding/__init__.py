"""One token more of every row, by the fastest way a model and its device have."""

from rehead.decoding.gpt import native_decoder, prepare, why_not
from rehead.decoding.graphed import graphed_decoder, why_no_graph
from rehead.model import LanguageModel
from rehead.model.base import Decode

__all__ = ["decoder", "graphed_decoder", "native_decoder", "prepare", "why_no_graph", "why_not"]


def decoder(model: LanguageModel) -> Decode:
    """`model.decoder()`, or what computes the same faster."""
    return native_decoder(model) or graphed_decoder(model) or model.decoder()
