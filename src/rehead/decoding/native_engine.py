"""Decoding in C++: a program over the cache rows, one call per token."""

from collections.abc import Sequence
from functools import cache as once
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from rehead.attention import LayerCache
from rehead.attention.program import Program
from rehead.decoding.check import Check
from rehead.decoding.lowering import lowered, stored_layers, why_not_lowered
from rehead.decoding.native_limits import refusal, short_table
from rehead.decoding.native_op import is_readable, kernel
from rehead.decoding.native_program import NativeProgram
from rehead.decoding.token import is_gapless, is_same, next_token, stores, widest
from rehead.decoding.torch_engine import torch_decoder
from rehead.model import LanguageModel
from rehead.model.base import Decode
from rehead.native import KernelUnavailable, library

MOST_SEQUENCES = 16
"""Batch size up to which reading the weights dominates the time of a token."""


def native_refusal(model: LanguageModel) -> str | None:
    """Return the reason why a model cannot be decoded in C++; None if it can."""
    weights = list(model.parameters())
    dtypes = {weight.dtype for weight in weights}
    if model.device.type != "cpu":
        return f"the model is on {model.device.type}"
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        return f"weights of {', '.join(sorted(map(str, dtypes)))}"
    if not all(map(is_readable, weights)):
        return "weights that are not in memory"
    program = lowered(model)
    if program is None:
        return why_not_lowered(model)
    if (reason := refusal(program) or short_table(program, model.config)) is not None:
        return reason
    if not all(weight.is_contiguous() for weight in weights):
        return "weights that are not contiguous"
    loaded = kernel()
    return str(loaded) if isinstance(loaded, KernelUnavailable) else None


def batch_refusal(n_sequence: int) -> str | None:
    """Return the reason why a batch goes to PyTorch instead of C++; None if it does not."""
    return f"{n_sequence} sequences, more than {MOST_SEQUENCES}" if n_sequence > MOST_SEQUENCES else None


def prepare(model: LanguageModel) -> None:
    """Build the C++ that generation with this model may need, so that log messages do not interrupt the text."""
    in_cpp = model.device.type == "cpu" and model.head.weight.dtype != torch.float64
    if in_cpp and model.lower() is not None:
        library("sequence")
        native_refusal(model)  # builds the decoder for a model that it takes


def native_decoder(model: LanguageModel) -> Decode | None:
    """Return a decoder in C++, or None if the model cannot be decoded in C++.

    It falls back to PyTorch for batches above `MOST_SEQUENCES` and for caches with gaps.
    """
    if native_refusal(model) is not None:
        return None
    program = lowered(model)
    assert program is not None
    layers, check = stored_layers(program), Check(model)
    by_torch = once(lambda: torch_decoder(model))  # only on demand, since it copies weights
    bound: list[BoundProgram] = []

    lock = Lock()  # threads that share a decoder take turns with its buffers

    def decode(ids: Tensor | np.ndarray, caches: Sequence[LayerCache]) -> Tensor:
        with lock:
            return decode_alone(ids, caches)

    def decode_alone(ids: Tensor | np.ndarray, caches: Sequence[LayerCache]) -> Tensor:
        ids, longest = check(ids, caches), widest(caches)
        if batch_refusal(len(ids)) is not None or not is_gapless(longest):
            return by_torch()(ids, caches)
        n_position = caches[0].n_token + 1
        if longest.is_full:
            bound.clear()  # it holds the rows that larger ones replace
        with next_token(ids, caches, layers) as token:
            if not bound or not bound[0].fits(caches, n_position):
                room = max(2 * n_position, widest(caches).n_rows, 64)
                bound[:] = [BoundProgram(program, caches, room)]
            if token.positions is None:
                positions = torch.full((len(ids),), token.start, device="cpu")
            else:
                positions = token.positions[:, 0].contiguous()
            logits = bound[0].run(ids.contiguous(), positions)
            return logits.to(model.head.weight.dtype, copy=True)

    return decode


class BoundProgram:
    """A program bound to the rows of given caches, for positions below `reach`."""

    def __init__(self, program: Program, caches: Sequence[LayerCache], reach: int) -> None:
        self.stores, self.reach = stores(caches), reach
        by_name = [dict(zip(cache.rows, cache.stores, strict=True)) for cache in caches]
        self.run = NativeProgram(program, by_name, reach)

    def fits(self, caches: Sequence[LayerCache], n_position: int) -> bool:
        """Whether the position is below `reach` and the caches still have the bound rows."""
        return n_position <= self.reach and is_same(stores(caches), self.stores)
