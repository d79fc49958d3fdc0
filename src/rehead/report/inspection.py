"""An inspection on the terminal, and as a page."""

import shutil
from collections.abc import Sequence
from textwrap import fill

from rehead.measure.inspection import Inspection, PrefixChange
from rehead.report import maps, page
from rehead.report.labels import labels
from rehead.report.shades import picture
from rehead.report.table import show

PREFIX = (
    "A token never sees what comes after it, and positions count from the start, so the rows of a shared beginning "
    "stay; a window only keeps later rows from reaching back to it."
)


def present(inspections: Sequence[Inspection], change: PrefixChange | None, layer: int, head: int) -> None:
    """One map of every text, the figures of all heads of the first, and what became of a shared prefix."""
    columns = shutil.get_terminal_size().columns
    for one in inspections:
        weights = one.head(layer, head)
        print(f"layer {layer}, head {head} ({one.variants[layer]}{_window(one.windows[layer])})\n")
        print("\n".join(picture(labels(one.tokens), weights, columns)) + "\n")
    spreads = inspections[0].spreads
    heads = [str(index) for index in range(max(len(figures.entropy) for figures in spreads))]
    for title, name, place in (("entropy (nats)", "entropy", 0), ("distance (tokens)", "distance", 1)):
        rows = [
            [
                str(index),
                *(f"{figure:.2f}" for figure in getattr(figures, name)),
                f"{figures.even[place]:.2f}",
            ]
            for index, figures in enumerate(spreads)
        ]
        show(f"{title} of each head, mean over the tokens", ("layer", *heads, "even"), rows)
    print("even: what a head has that weighs all it may see alike")
    if change is not None:
        print(f"\n{said(change)}")
        print(fill(PREFIX, min(columns, 110)))


def said(change: PrefixChange) -> str:
    """The verdict on a shared prefix, in one line."""
    verdict = "unchanged" if change.unchanged else "CHANGED"
    tokens = "1 token" if change.n_token == 1 else f"{change.n_token} tokens"
    return f"shared prefix of {tokens}: rows {verdict}, in all layers and heads within {change.largest:.1e}"


def html(
    title: str, inspections: Sequence[Inspection], change: PrefixChange | None, layer: int, head: int
) -> str:
    """The whole page: the maps of every text to look through."""
    figures = [
        maps.fragment(one.text[:200], one.tokens, one.maps, one.windows, layer=layer, head=head)
        for one in inspections
    ]
    verdict = "" if change is None else f"<p>{said(change)}. {PREFIX}</p>\n"
    return page.page(title, page.plotly() + maps.script() + verdict + "".join(figures))


def _window(window: int | None) -> str:
    return "" if window is None else f", window {window}"
