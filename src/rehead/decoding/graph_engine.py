"""A program as a CUDA graph: some hundred kernels started by one call, which is what a small model waits for.

What PyTorch runs of it is recorded. A graph serves all positions below a power of two, and looks at as many rows, most
of which it hides; then the next is captured. It is trusted once a replay has agreed with PyTorch's run of the same, at
a position it was not captured at.
Tested by recording operations on a CPU; it has not been run on a GPU, nor is its speed known.
"""

from collections.abc import Callable, Sequence
from functools import cache as once

import torch
from torch import Tensor

from rehead.attention import LayerCache
from rehead.attention.kernels.selfcheck import passes, relative_error
from rehead.attention.program import Call
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
from rehead.decoding.torch_engine import TorchProgram, lowered, stored_layers, why_not_lowered
from rehead.model import LanguageModel
from rehead.model.base import Decode
from rehead.native import switch

DEVICE = "cuda"
"""The kind of device that has graphs."""
LEAST_REACH = 256
"""Tokens that the first graph serves; each one after it twice as many."""
BUDGET = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far logits may be from those of PyTorch, of the largest: libraries may take other kernels while captured."""


def graph_refusal(model: LanguageModel) -> str | None:
    """Why this model is not decoded by CUDA graphs; None where it is."""
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
        if isinstance(op, Call) and op.layer is not None:
            return f"a {type(op.module).__name__} that only its forward describes"
    return None


def graph_decoder(model: LanguageModel) -> Decode | None:
    """Decoding by CUDA graphs; None where the model is not decoded so."""
    return Graphed(model) if graph_refusal(model) is None else None


class Graphed:
    """Keeps the books of the caches, and the graph for where they are."""

    def __init__(self, model: LanguageModel) -> None:
        program = lowered(model)
        assert program is not None
        self.model, self.run, self.layers = model, TorchProgram(program), stored_layers(program)
        self.bound: CapturedStep | None = None
        self.is_trusted = True
        self._left: Tensor | None = None  # what the last step knew of the rows

    def __call__(self, ids: Tensor, cache: Sequence[LayerCache]) -> Tensor:
        """See `Decode`."""
        self.model.require_room(cache[0].n_token + 1)
        is_gapless = self.is_trusted and self._is_gapless(widest(cache))
        token = next_token(ids, cache, self.layers)
        if not is_gapless:
            return self.run(token)
        self._left = widest(cache).positions
        reach = max(LEAST_REACH, 1 << (cache[0].n_token - 1).bit_length())
        if self.bound is None or not self.bound.fits(cache, reach):
            self.bound = None  # its memory is free before there is another
            self.bound = CapturedStep(self.run, cache, reach)
        logits = self.bound(token)
        self.is_trusted = self.bound.is_trusted
        if not self.is_trusted:
            self.bound = None
        return logits

    def _is_gapless(self, cache: LayerCache) -> bool:
        """Looked at once: a step leaves no gap, and who else writes leaves other positions."""
        return (cache.positions is not None and cache.positions is self._left) or is_gapless(cache)


class CapturedStep:
    """The step over certain rows of caches, for positions below `reach`.

    Run twice by PyTorch, which compiles what there is to compile; captured; replayed and held against a third run.
    """

    def __init__(self, run: TorchProgram, cache: Sequence[LayerCache], reach: int) -> None:
        self.run, self.cache, self.stores = run, list(cache), stores(cache)
        self.tables = Tables(reach)
        self.device, n_row = self.stores[0].device, len(self.stores[0])
        with torch.inference_mode(False):  # buffers that anybody may write into
            self.ids = torch.zeros(n_row, dtype=torch.long, device=self.device)
            self.positions = torch.zeros(n_row, 1, dtype=torch.long, device=self.device)
        self.logits: Tensor | None = None
        self.replay: Callable[[], None] | None = None
        self.n_run, self.is_trusted = 0, True

    def fits(self, cache: Sequence[LayerCache], reach: int) -> bool:
        """True while the rows are where they were, and positions below `reach`."""
        return reach == self.tables.reach and is_same(stores(cache), self.stores)

    def __call__(self, token: Token) -> Tensor:
        """Logits, (B, vocab)."""
        self.ids.copy_(token.ids)
        if token.positions is None:
            self.positions.fill_(token.start)
        else:
            self.positions.copy_(token.positions)
        if self.replay is not None and self.n_run > 2:
            self.replay()
        else:
            self._prove()
        assert self.logits is not None
        return self.logits.clone()

    def _prove(self) -> None:
        """One of the first three steps."""
        self.n_run += 1
        otherwise = f"CUDA graphs are not used on {self.device}, PyTorch decodes"
        if self.n_run < 3:
            self._run()
        if self.n_run == 2:
            self.is_trusted = passes(self._captured, 0.0, otherwise)
        elif self.n_run == 3:
            assert self.logits is not None
            self.is_trusted = passes(self._replayed, BUDGET[self.logits.dtype], otherwise)

    def _captured(self) -> float:
        self.replay = capture(self._run, self.device)
        return 0.0

    def _replayed(self) -> float:
        """How far a replay is from a run, which follows it on the rows as they were before."""
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

    @torch.no_grad()
    def _run(self) -> None:
        """Writes logits and the new token's rows. The same again, if nothing else was written."""
        logits = self.run(recorded_token(self.ids, self.positions, self.cache, self.tables))
        if self.logits is None:
            with torch.inference_mode(False):
                self.logits = torch.empty_like(logits)
        self.logits.copy_(logits)


def capture(run: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """What repeats what `run` does on a device, as a CUDA graph; done now or not, it can be done again."""
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=_stream(device), capture_error_mode="thread_local"),
    ):
        run()
    return graph.replay


@once
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One to capture on: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
