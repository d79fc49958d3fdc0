"""Claims about the losses of two variants: only of comparable ones, and only what the seeds support."""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from rehead.study.chance import LEVEL, chance, corrected

Record = dict[str, Any]


def claim(base: Record, other: Record) -> Record:
    """Compare the losses of `other` with those of `base`, two variants of a study's document.

    `length` is the longest block that both were evaluated at; `shorter` is True if one of them has longer
    blocks. `difference` is that of the means there; `p` is how often seeds alone make as large a one, and `told_apart`
    is True if that is rare. For variants that cannot be compared, `unlike` has the reasons, and these keys are absent.
    """
    names = {"variant": other["variant"], "against": base["variant"]}
    reasons = unlike(base, other)
    if reasons:
        return {**names, "unlike": reasons}
    length = max(_lengths(base) & _lengths(other))
    before, after = (_losses(variant, str(length)) for variant in (base, other))
    shorter = length < max(base["length"], other["length"])
    random = [len(variant["runs"]) for variant in (base, other) if not _is_known(variant, str(length))]
    return {**names, "length": length, "shorter": shorter, **compare(before, after, min(random, default=1))}


def claims(base: Record, others: Sequence[Record]) -> list[Record]:
    """Compare each of `others` with `base`, as `claim` does, with `p` corrected for the number of comparisons."""
    found = [claim(base, other) for other in others]
    alike = [verdict for verdict in found if "unlike" not in verdict]
    for verdict, p in zip(alike, corrected([verdict["p"] for verdict in alike]), strict=True):
        verdict.update(p=p, told_apart=verdict["told_apart"] and p < LEVEL)
    return found


def unlike(base: Record, other: Record) -> list[str]:
    """Return why the losses of two variants are not compared; empty if they are.

    Losses are compared after the same number of optimizer steps, on the same blocks of the same text.
    """
    reasons = []
    if base["on"]["text"] != other["on"]["text"]:
        reasons.append("another text or tokenizer")
    if base["on"]["blocks"] != other["on"]["blocks"]:
        reasons.append(f"validated on {other['on']['blocks']:,} blocks, not {base['on']['blocks']:,}")
    if not _lengths(base) & _lengths(other):
        reasons.append(f"blocks of {other['length']:,} tokens, not {base['length']:,}")
    if base["steps"] != other["steps"]:
        reasons.append(f"{other['steps']:,} steps, not {base['steps']:,}")
    return reasons


def beaten(variant: Record, others: Sequence[Record], bytes_of: Callable[[Record], float]) -> bool:
    """Return True if one of `others` needs no more bytes per token and its losses are clearly lower."""
    rivals = [
        other
        for other in others
        if bytes_of(other) <= bytes_of(variant) and other["length"] == variant["length"]
    ]
    return any(
        "unlike" not in verdict and verdict["told_apart"] and verdict["difference"] < 0
        for verdict in claims(variant, rivals)
    )


def compare(base: Sequence[float], other: Sequence[float], seeds: int) -> Record:
    """Return the difference of the means, other - base, and whether it is one that seeds alone rarely make.

    `seeds` is the number of runs that differ by chance: a given model's do not.
    """
    p = chance(base, other)
    return {
        "difference": fmean(other) - fmean(base),
        "seeds": seeds,
        "p": p,
        "told_apart": p < LEVEL and seeds >= 2,
    }


def _losses(variant: Record, length: str) -> list[float]:
    """Return the losses of all runs; of a model whose seeds are no repetitions, the one it has."""
    losses = [run["val_loss_at"][length] for run in variant["runs"]]
    return [fmean(losses)] if _is_known(variant, length) else losses


def _is_known(variant: Record, length: str) -> bool:
    """Whether no seed changes the loss: of a given model, and of one made of it without chance."""
    losses = {run["val_loss_at"][length] for run in variant["runs"]}
    return variant["kind"] == "given" or len(losses) == 1 < len(variant["runs"])


def _lengths(variant: Record) -> set[int]:
    """Return the block lengths that every run was evaluated at."""
    return set.intersection(*({int(length) for length in run["val_loss_at"]} for run in variant["runs"]))
