"""The table, the samples and the picture of a study."""

from pathlib import Path
from typing import Any

from rehead.report.plot import loss_curves
from rehead.report.table import show

HEADER = (
    "variant",
    "val loss",
    "parameters",
    "KV B/token\npredicted",
    "\nheld",
    "tok/s\ncached",
    "\nuncached",
)


def present(document: dict[str, Any], folder: Path) -> None:
    """Print what a study found, and draw `folder`/loss_curves.png."""
    variants = document["variants"]
    context = variants[0]["context"]
    rows = [
        (
            one["variant"],
            f"{one['val_loss']:.4f}",
            f"{one['parameters']:,}",
            f"{one['cache_bytes_predicted'] / context:,.0f}",
            f"{one['cache_bytes_held'] / context:,.0f}",
            f"{one['tokens_per_second_cached']:,.0f}",
            f"{one['tokens_per_second_uncached']:,.0f}",
        )
        for one in variants
    ]
    for one in variants:
        print(f"\n{one['variant']}: {' '.join(one['sample'].split())}")
    print()
    notes = (
        "val loss in nats per token. KV bytes in float32 over all layers, the cache after "
        f"{context} tokens divided by {context}; an RNN keeps one state instead. tok/s: greedy, "
        f"{context - 1} tokens, batch 1."
    )
    show(document["about"], HEADER, rows, notes)
    curves = {one["variant"]: [(step, loss) for step, loss in one["curve"]] for one in variants}
    loss_curves(curves, folder / "loss_curves.png", "Loss by how heads share keys and values")
    print(f"curves   {folder / 'loss_curves.png'}\nnumbers  {folder / 'results.json'}")
