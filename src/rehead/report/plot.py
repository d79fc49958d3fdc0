"""Pictures. One colour per variant everywhere, told apart by colour-blind readers (Okabe and Ito)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rehead.errors import UsageError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#000000")
STYLES = ("-", "--", "-.", ":")


def loss_curves(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, title: str) -> None:
    """Validation loss over steps, one line per name; written to `path` as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError('plots need matplotlib: pip install "rehead[report]".') from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(curves.items()):
        steps, losses = zip(*points, strict=True)
        axes.plot(
            steps,
            losses,
            label=f"{name}  {losses[-1]:.3f}",
            color=COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index // len(COLOURS) % len(STYLES)],
            linewidth=1.8,
        )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, title="variant, last loss")
    figure.savefig(path, dpi=120)
