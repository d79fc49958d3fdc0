"""What may be said of the losses of two variants: nothing of unlike ones, nothing that the seeds do not bear."""

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


def claim(base: Record, other: Record) -> Record:
    """How the losses of `other` lie to those of `base`, two variants of a study's document.

    At the longest blocks both were evaluated at (`length`; `shorter` where one of them has longer ones): the
    `difference` of the means and whether they are `told_apart`. Of variants that cannot be compared `unlike`
    says why, and nothing else is there.
    """
    told = {"variant": other["variant"], "against": base["variant"]}
    reasons = unlike(base, other)
    if reasons:
        return {**told, "unlike": reasons}
    length = max(_lengths(base) & _lengths(other))
    losses = [[run["val_loss_at"][str(length)] for run in one["runs"]] for one in (base, other)]
    shorter = length < max(base["length"], other["length"])
    return {**told, "length": length, "shorter": shorter, **compare(*losses)}


def unlike(base: Record, other: Record) -> list[str]:
    """Why the losses of two variants are not compared: what sets `other` apart beside its attention.

    Losses are compared after equally many optimizer steps, on the same blocks of the same text.
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


def beats(one: Record, other: Record, bytes_of: Any) -> bool:
    """Whether a like variant needs no more bytes per token (`bytes_of`) and has losses told apart below."""
    if bytes_of(one) > bytes_of(other) or one["length"] != other["length"] or unlike(other, one):
        return False
    found = claim(other, one)
    return bool(found["told_apart"] and found["difference"] < 0)


def compare(base: Sequence[float], other: Sequence[float]) -> Record:
    """How much the second lies above the first, in the mean, and whether the runs allow to say so."""
    apart = min(other) > max(base) or max(other) < min(base)
    return {
        "difference": sum(other) / len(other) - sum(base) / len(base),
        "seeds": min(len(base), len(other)),
        "told_apart": apart and min(len(base), len(other)) >= 2,
    }


def _lengths(variant: Record) -> set[int]:
    """Of blocks that every run was evaluated at."""
    return set.intersection(*({int(length) for length in run["val_loss_at"]} for run in variant["runs"]))
