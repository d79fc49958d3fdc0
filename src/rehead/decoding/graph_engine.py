"""Programs as CUDA graphs: one call replaces hundreds of kernel launches, which dominate the time of a small model.

The graph records PyTorch's execution of the program. A graph is valid for all positions below a power of two: it reads
that many rows and masks the unused ones; beyond that, the next graph is captured. A graph is used after a self-check:
a replay must agree with an eager run at a position other than that of the capture.
Tests record the operations on a CPU. The engine has not run on a GPU yet, and its speed is unknown.
"""

from collections.abc import Callable, Sequence
from functools import cache as once
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from rehead.attention import LayerCache
from rehead.attention.kernels.selfcheck import passes, relative_error
from rehead.attention.program import Call
from rehead.decoding.check import Check
from rehead.decoding.lowering import lowered, only_forward, stored_layers, why_not_lowered
from rehead.decoding.token import (
    Tables,
    Token,
    is_gapless,
    is_same,
    next_token,
    recorded_token,
    stores,
    widest,
)
from rehead.decoding.torch_engine import TorchProgram
from rehead.model import LanguageModel
from rehead.model.base import Decode
from rehead.model.experts import MixtureOfExperts
from rehead.native import switch

DEVICE = "cuda"
"""The device type that supports graphs."""
LEAST_REACH = 256
"""Number of positions of the first graph; each later graph has twice as many."""
BUDGET = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Maximum relative error of logits against an eager run; libraries may choose other kernels during capture."""


def graph_refusal(model: LanguageModel) -> str | None:
    """Return the reason why a model cannot be decoded with CUDA graphs; None if it can."""
    if model.device.type != DEVICE:
        return f"the model is on {model.device.type}"
    if (refusal := switch.gpu_refusal()) is not None:
        return refusal
    if model.head.weight.dtype not in BUDGET:
        return f"weights of {model.head.weight.dtype}"
    program = lowered(model)
    if program is None:
        return why_not_lowered(model)
    for op in program.ops:
        if isinstance(op, Call) and (op.layer is not None or isinstance(op.module, MixtureOfExperts)):
            return only_forward(op.module)
    return None


def graph_decoder(model: LanguageModel) -> Decode | None:
    """Return a decoder with CUDA graphs; None if the model cannot be decoded with them."""
    return Graphed(model) if graph_refusal(model) is None else None


class Graphed:
    """Decodes with one captured graph at a time; captures another if the caches or the range of positions change."""

    def __init__(self, model: LanguageModel) -> None:
        program = lowered(model)
        assert program is not None
        self.run, self.layers = TorchProgram(program), stored_layers(program)
        self.check = Check(model)
        self.bound: CapturedStep | None = None
        self.is_trusted = True
        self._last_positions: Tensor | None = None  # the rows' positions after the last step
        self._lock = Lock()  # threads that share a decoder take turns with its graph

    def __call__(self, ids: Tensor | np.ndarray, cache: Sequence[LayerCache]) -> Tensor:
        """Return the logits after `ids` (B,), (B, vocab), and append the tokens to the caches."""
        with self._lock:
            return self._decode(ids, cache)

    def _decode(self, ids: Tensor | np.ndarray, cache: Sequence[LayerCache]) -> Tensor:
        ids = self.check(ids, cache)
        is_gapless = self.is_trusted and self._is_gapless(widest(cache))
        if widest(cache).is_full:
            self.bound = None  # it holds the rows that larger ones replace
        with next_token(ids, cache, self.layers) as token:
            return self._replayed(token, cache) if is_gapless else self.run(token)

    def _replayed(self, token: Token, cache: Sequence[LayerCache]) -> Tensor:
        """Return the logits by the graph, which is captured where there is none for these rows and positions."""
        self._last_positions = widest(cache).positions
        reach = max(LEAST_REACH, 1 << (cache[0].n_token - 1).bit_length())
        if self.bound is None or not self.bound.fits(cache, reach):
            self.bound = None  # free its memory before the next capture
            self.bound = CapturedStep(self.run, cache, reach)
        try:
            logits = self.bound(token)
        except BaseException:
            self.bound = None  # it has counted a step that the caches take back
            raise
        self.is_trusted = self.bound.is_trusted
        if not self.is_trusted:
            self.bound = None
            return self.run(token)  # what failed may have been the eager run, too
        return logits

    def _is_gapless(self, cache: LayerCache) -> bool:
        """Whether the cache has no gap; only checked again after another writer replaced its positions."""
        return (cache.positions is not None and cache.positions is self._last_positions) or is_gapless(cache)


class CapturedStep:
    """A decoding step bound to the rows of given caches, for positions below `reach`.

    The first two steps run eagerly (warm-up), then the graph is captured. The third step compares a replay with an
    eager run.
    """

    def __init__(self, run: TorchProgram, cache: Sequence[LayerCache], reach: int) -> None:
        self.run, self.cache, self.stores = run, list(cache), stores(cache)
        self.tables = Tables(reach)
        self.device, n_row = self.stores[0].device, len(self.stores[0])
        with torch.inference_mode(False):  # so that the buffers can be written in any mode
            self.ids = torch.zeros(n_row, dtype=torch.long, device=self.device)
            self.positions = torch.zeros(n_row, 1, dtype=torch.long, device=self.device)
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.n_run, self.is_trusted = 0, True

    def fits(self, cache: Sequence[LayerCache], reach: int) -> bool:
        """Whether `reach` is that of the graph and the caches still have the bound rows."""
        return reach == self.tables.reach and is_same(stores(cache), self.stores)

    def __call__(self, token: Token) -> Tensor:
        """Return the logits, (B, vocab)."""
        self.ids.copy_(token.ids)
        if token.positions is None:
            self.positions.fill_(token.start)
        else:
            self.positions.copy_(token.positions)
        if self.replay is not None and self.n_run > 2:
            self.replay()
        else:
            self._check()
        assert self.logits is not None
        return self.logits.clone()

    def _check(self) -> None:
        """Compute one of the first three steps: warm-up, capture or comparison."""
        self.n_run += 1
        fallback = f"CUDA graphs are not used on {self.device}, PyTorch decodes"
        if self.n_run < 3:
            self._run()
        if self.n_run == 2:
            self.is_trusted = passes(self._capture, 0.0, fallback)
        elif self.n_run == 3:
            assert self.logits is not None
            self.is_trusted = passes(self._replay_error, BUDGET[self.logits.dtype], fallback)

    def _capture(self) -> float:
        self.replay = capture(self._run, self.device)
        return 0.0

    def _replay_error(self) -> float:
        """Return the relative error of a replay against an eager run from the same state of the rows."""
        assert self.replay is not None
        assert self.logits is not None
        before: list[Tensor] = []
        try:
            before += [store.clone() for store in self.stores]
            self.logits.fill_(torch.nan)
            self.replay()
            got = self.logits.clone()
        finally:
            for store, rows in zip(self.stores, before, strict=False):
                store.copy_(rows)
            self._run()
        return relative_error(got, self.logits)

    def _run(self) -> None:
        """Write the logits and the new token's rows; repeating it gives the same result."""
        logits = self.run(recorded_token(self.ids, self.positions, self.cache, self.tables))
        if self.logits is None:
            with torch.inference_mode(False):
                self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Capture `run` as a CUDA graph and return its replay function.

    Capturing may or may not execute `run`, so `run` must be repeatable.
    """
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"),
    ):
        run()
    return graph.replay


@once
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
