"""Decoding: one token of every sequence at a time, by the fastest engine for a model and its device.

A model describes one token as a program (`rehead.attention.program`); the engines execute it.
"""

from rehead.decoding.change import Decoder
from rehead.decoding.graph_engine import graph_decoder, graph_refusal
from rehead.decoding.lowering import is_intercepted, is_whole
from rehead.decoding.native_engine import batch_refusal, native_decoder, native_refusal, prepare
from rehead.decoding.torch_engine import torch_decoder
from rehead.model import LanguageModel, evaluated
from rehead.model.base import Decode

__all__ = [
    "batch_refusal",
    "decoder",
    "graph_decoder",
    "graph_refusal",
    "is_intercepted",
    "is_whole",
    "native_decoder",
    "native_refusal",
    "prepare",
    "torch_decoder",
]


def decoder(model: LanguageModel) -> Decode:
    """Return the function that decodes one token of every sequence with the current weights.

    It decodes in eval mode, whatever the mode of the model, and without gradients. When the model is changed later,
    converted or moved (`model.double()`), gets hooks or is called under autocast, the decoder notices and adapts; the
    exceptions are in `rehead.decoding.change.Decoder`.
    """

    def engine() -> Decode:
        still = evaluated(model)
        return native_decoder(still) or graph_decoder(still) or torch_decoder(still)

    return Decoder(model, engine)
