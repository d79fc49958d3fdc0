"""Draws the losses of `latents.py` over the share of the cache and over the time of a decoded token."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure


class Measured(NamedTuple):
    """A conversion: its share of the source's cache, its losses over the source's and its time over the source's.

    Losses are by number of healing steps, text and seed.
    """

    share: float
    kind: str
    split: str
    losses: list[list[list[float]]]
    time: float | None


def draw(rows: Sequence[Measured], steps: Sequence[int], n_past: int, path: Path) -> None:
    """Draw the first text's losses: of the conversions as thin lines, after the most steps as thick ones."""
    figure = Figure(figsize=(12 if n_past else 6.5, 5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(1, 2 if n_past else 1, sharey=True, squeeze=False)[0])
    kinds = [kind for kind in dict.fromkeys(row.kind for row in rows) if not kind.startswith("source")]
    for number, kind in enumerate(kinds):
        found = [row for row in rows if row.kind == kind]
        places = [[row.share for row in found], [row.time or 0.0 for row in found]]
        for one, x in zip(axes, places, strict=False):
            for step in sorted({0, len(steps) - 1}):
                losses = [mean(row.losses[step][0]) for row in found]
                wide = step > 0 or len(steps) == 1
                one.plot(
                    x, losses, marker="o", color=f"C{number}", linewidth=2 if wide else 0.8,
                    markersize=5 if wide else 3, label=kind if wide else None,
                )  # fmt: skip
    for one in axes:
        one.set_yscale("symlog", linthresh=0.03)
        one.axhline(0, color="black", linewidth=0.5)
        one.grid(alpha=0.3)
    axes[0].set(xlabel="KV cache, share of the source's", ylabel="loss over the source's, nats per token")
    if n_past:
        axes[1].set(xlabel=f"time of a token after {n_past:,}, over the source's")
    title = f"thick: after {steps[-1]} steps of healing" if steps[-1] else None
    figure.legend(
        *axes[0].get_legend_handles_labels(), title=title, fontsize=8, loc="outside lower center", ncols=4
    )
    figure.savefig(path, dpi=120)
