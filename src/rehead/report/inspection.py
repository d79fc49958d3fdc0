"""An inspection on the terminal, and as a page."""

import shutil
from collections.abc import Sequence
from statistics import median
from textwrap import fill

from rehead.measure.inspection import Inspection, PrefixChange, equal_rows
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
    columns, first = shutil.get_terminal_size().columns, inspections[0]
    for one in inspections:
        equal = [] if one is first or change is None else equal_rows(first, one, change.n_token, layer, head)
        print(f"layer {layer}, head {head} ({one.variants[layer]}{_window(one.windows[layer])})\n")
        print("\n".join(picture(labels(one.tokens), one.head(layer, head), columns, equal)) + "\n")
    spreads = first.spreads
    for unit, name, place in (("nats", "entropy", 0), ("tokens", "distance", 1)):
        figures = [getattr(one, name) for one in spreads]
        head_names, rows = _rows(figures, columns)
        even = [f"{one.even[place]:.2f}" for one in spreads]
        rows = [[str(index), *row, even[index]] for index, row in enumerate(rows)]
        show(f"{name} ({unit}) of each head, mean over the tokens", ("layer", *head_names, "even"), rows)
    print("even: what a head has that weighs all it may see alike")
    if change is not None:
        print(f"\n{said(change)}")
        print(fill(PREFIX, min(columns, 110)))


def _rows(figures: Sequence[Sequence[float]], columns: int) -> tuple[list[str], list[list[str]]]:
    """A column for each head where they fit; else the least, the median and the most of each layer."""
    most = max(map(len, figures))
    if 7 * (most + 2) <= columns:
        rows = [[f"{figure:.2f}" for figure in row] + [""] * (most - len(row)) for row in figures]
        return [str(head) for head in range(most)], rows
    rows = []
    for row in figures:
        order = sorted(range(len(row)), key=row.__getitem__)
        low, high = (f"{row[head]:.2f} (head {head})" for head in (order[0], order[-1]))
        rows.append([low, f"{median(row):.2f}", high])
    return ["least", "median", "most"], rows


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
    return page.page(title, verdict + "".join(figures), maps.script())


def _window(window: int | None) -> str:
    return "" if window is None else f", window {window}"
