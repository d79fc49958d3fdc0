"""Decoding: one more token of every sequence, by the fastest engine that a model and its device have.

A model says what one token is as a program (`rehead.attention.program`); the engines execute it.
"""

from rehead.decoding.graph_engine import graph_decoder, graph_refusal
from rehead.decoding.native_engine import native_decoder, native_refusal, prepare
from rehead.decoding.torch_engine import torch_decoder
from rehead.model import LanguageModel
from rehead.model.base import Decode

__all__ = [
    "decoder",
    "graph_decoder",
    "graph_refusal",
    "native_decoder",
    "native_refusal",
    "prepare",
    "torch_decoder",
]


def decoder(model: LanguageModel) -> Decode:
    """What generation calls for one more token of every sequence, with the weights as they are now.

    For a model in eval mode, without gradients. After weights change, make a new one.
    """
    return native_decoder(model) or graph_decoder(model) or torch_decoder(model)
