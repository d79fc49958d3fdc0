"""What the losses of a study say, in sentences."""

from collections.abc import Sequence
from typing import Any

from rehead.report.text import sanitise
from rehead.study.results import mean_and_range

Record = dict[str, Any]


def compared(verdicts: Sequence[Record]) -> list[str]:
    """Return the findings about the losses of a question."""
    alike = [verdict for verdict in verdicts if "unlike" not in verdict]
    if any(verdict["seeds"] < 2 for verdict in alike):
        sentences = ["One seed each: no difference between losses is claimed."]
    else:
        sentences = [_apart(verdict) for verdict in alike if verdict["told_apart"]]
        equal = [verdict for verdict in alike if not verdict["told_apart"]]
        for seeds in sorted({verdict["seeds"] for verdict in equal}):
            names = "; ".join(_equal(verdict) for verdict in equal if verdict["seeds"] == seeds)
            against = sanitise(equal[0]["against"])
            sentences.append(f"Not told apart from {against} over {seeds} seeds, in nats per token: {names}.")
    rest = [verdict for verdict in verdicts if "unlike" in verdict]
    if rest:
        reasons = "; ".join(
            f"{sanitise(verdict['variant'])} ({', '.join(verdict['unlike'])})" for verdict in rest
        )
        sentences.append(f"Not comparable with {sanitise(rest[0]['against'])}: {reasons}.")
    return sentences


def growth(variants: Sequence[Record]) -> list[str]:
    """Return how the loss changed in each variant that continues another one with longer blocks."""
    sentences = []
    for variant in variants:
        starts = [run["curve"][0] for run in variant["runs"] if run["curve"]]
        begun = [point for point in starts if point[0] == variant["steps_before"]]
        if variant["length"] <= variant["length_before"] or len(begun) < len(variant["runs"]):
            continue
        before, after = loss(mean_and_range([point[2] for point in begun])), loss(variant["val_loss"])
        sentences.append(
            f"{sanitise(variant['variant'])} grows from {variant['length_before']:,} to {variant['length']:,} tokens "
            f"after {variant['steps_before']:,} steps: at {variant['length']:,} its loss is {before} at that point "
            f"and {after} after {variant['steps'] - variant['steps_before']:,} more."
        )
    return sentences


def _apart(verdict: Record) -> str:
    name, base, by = sanitise(verdict["variant"]), sanitise(verdict["against"]), verdict["difference"]
    side = "above" if by > 0 else "below"
    over = f"over {verdict['seeds']} seeds ({_p(verdict)})"
    return f"{name} ends {abs(by):.4f} nats per token {side} {base}{_at(verdict)}, {over}."


def _equal(verdict: Record) -> str:
    return f"{sanitise(verdict['variant'])}{_at(verdict)} by {verdict['difference']:+.4f} ({_p(verdict)})"


def _at(verdict: Record) -> str:
    return f" at {verdict['length']:,} tokens" if verdict["shorter"] else ""


def _p(verdict: Record) -> str:
    return "p < 0.001" if verdict["p"] < 0.001 else f"p = {verdict['p']:.2g}"


def loss(values: Sequence[float]) -> str:
    """Format a mean with its range."""
    mean, low, high = values
    return f"{mean:.4f}" if low == high else f"{mean:.4f} ({low:.4f} to {high:.4f})"
