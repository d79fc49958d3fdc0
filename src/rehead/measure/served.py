"""Says whether a model can be served in a smaller number format, by measuring what it would predict."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rehead.data import Ids
from rehead.errors import NumericError
from rehead.measure.fidelity import Comparison
from rehead.measure.forecast import batch_of
from rehead.measure.stored import BATCH, Storage, as_stored, comparison, lost_rows
from rehead.model import LanguageModel
from rehead.model.base import keeps_dtype
from rehead.system.device import free_memory
from rehead.system.memory import require_memory

SAFE = 0.01
"""Largest mean KL in nats that counts as safe. 8 bits cost a sound model up to 0.003, lost weights 1 or more."""
TOKENS, COMPUTED = 4096, 1024
"""Tokens compared, at most, or one block; fewer where computation is also in 16 bits, which is slow on many CPUs."""
COMPUTES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Formats that engines also compute in; with q8_0 they compute in larger ones."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What serving in the format `dtype` changes; None where there is no finite prediction.

    `kl` is the mean of KL(exact || stored) in nats, `loss` and `loss_exact` are nats per token with and without the
    rounding, `argmax_flips` is the share of tokens whose likeliest successor differs. `kl_computed` is the KL where the
    computation is in that format, too, on `COMPUTED` tokens or one block; None for q8_0. `tokens` is how many were
    compared. `lost` has, per kind of weight, the share of its rows that the format loses. `problem` says why it is not
    safe, or is None.
    """

    dtype: Storage
    tokens: int
    kl: float | None = None
    loss: float | None = None
    loss_exact: float | None = None
    argmax_flips: float | None = None
    kl_computed: float | None = None
    lost: dict[str, float]
    problem: str | None

    @property
    def safe(self) -> bool:
        """Whether the predictions stay what they are, up to `SAFE` nats."""
        return self.problem is None


def compared(ids: Ids, length: int) -> int:
    """Return how many tokens of a text are predicted for a verdict: whole blocks of `length`, or all there are."""
    return min(len(ids) - 1, max(1, TOKENS // length) * length)


def verdicts(
    exact: LanguageModel, kinds: Sequence[Storage], ids: Ids, length: int, bos: int | None = None
) -> list[Verdict]:
    """Return for each format whether a model can be served in it, measured on a text in the blocks of `evaluate_text`.

    `exact` should be in float32. Raises ResourceError for blocks that do not fit the memory.
    """
    dtype, device, many = exact.head.weight.dtype, exact.device, max(1, BATCH // length)
    _, parts = batch_of(exact.config, length, dtype, free_memory(device), many)
    require_memory(f"reading {many} x {length:,} tokens at once", parts, "Use a smaller --length.", device)
    lost = lost_rows(exact, *kinds)
    return [
        _verdict(
            exact, kind, ids, length, bos, {name: share[kind] for name, share in lost.items() if share[kind]}
        )
        for kind in kinds
    ]


def _verdict(
    exact: LanguageModel, kind: Storage, ids: Ids, length: int, bos: int | None, lost: dict[str, float]
) -> Verdict:
    try:
        stored = as_stored(exact, kind)
        found = comparison(exact, stored, ids, length, TOKENS, bos=bos)
    except NumericError as error:
        return Verdict(dtype=kind, tokens=compared(ids, length), lost=lost, problem=str(error))
    computed, problem = None, _problem(found, "")
    if kind in COMPUTES:
        try:
            computing = _computing(stored, exact, COMPUTES[kind])
            rounded = comparison(exact, computing, ids, length, COMPUTED, bos=bos)
        except NumericError:
            problem = problem or f"computed in {kind}, its predictions are not finite."
        else:
            computed, problem = rounded.kl, problem or _problem(rounded, f"when computed in {kind} as well, ")
    return Verdict(
        dtype=kind,
        tokens=found.tokens,
        kl=found.kl,
        loss=found.losses[1],
        loss_exact=found.losses[0],
        argmax_flips=found.argmax_flips,
        kl_computed=computed,
        lost=lost,
        problem=problem,
    )


def _computing(stored: LanguageModel, exact: LanguageModel, dtype: torch.dtype) -> LanguageModel:
    """Return `stored` in a dtype, but for what keeps its own."""
    weights = dict(exact.named_parameters())
    for name, weight in stored.to(dtype).named_parameters():
        if keeps_dtype(name):
            weight.data = weights[name].detach()
    return stored


def _problem(found: Comparison, how: str) -> str | None:
    if found.kl <= SAFE:
        return None
    return f"{how}its predictions change by {found.kl:.2g} nats (mean KL); up to {SAFE:g} is safe."
