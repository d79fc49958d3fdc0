"""Shows an inspection on the terminal, and as a page."""

import shutil
from collections.abc import Sequence
from statistics import median
from textwrap import fill

from rehead.measure.inspection import Inspection, PrefixChange, equal_rows
from rehead.report import maps, page
from rehead.report.table import show
from rehead.report.terminal_map import render
from rehead.report.text import token_labels

PREFIX = (
    "A token never sees later tokens, and positions count from the start, so the rows of a shared beginning do not "
    "change. A window only keeps later rows from attending to it."
)


def present(inspections: Sequence[Inspection], change: PrefixChange | None, layer: int, head: int) -> None:
    """Print one map of every text, the figures of all heads of the first, and the change of a shared prefix."""
    columns, first = shutil.get_terminal_size().columns, inspections[0]
    for inspection in inspections:
        equal: list[bool] = []
        if inspection is not first and change is not None:
            equal = equal_rows(first, inspection, change.n_token, layer, head)
        variant, window = inspection.variants[layer], inspection.windows[layer]
        print(f"layer {layer}, head {head} ({variant}{_window(window)})\n")
        weights = inspection.head(layer, head)
        print("\n".join(render(token_labels(inspection.tokens), weights, columns, equal)) + "\n")
    spreads = first.spreads
    for unit, name, place in (("nats", "entropy", 0), ("tokens", "distance", 1)):
        figures = [getattr(spread, name) for spread in spreads]
        head_names, rows = _rows(figures, columns)
        even = [f"{spread.even[place]:.2f}" for spread in spreads]
        rows = [[str(index), *row, even[index]] for index, row in enumerate(rows)]
        show(f"{name} ({unit}) of each head, mean over the tokens", ("layer", *head_names, "even"), rows)
    print("even: a head with equal weights on all visible tokens")
    if change is not None:
        print(f"\n{verdict(change)}")
        print(fill(PREFIX, min(columns, 110)))


def _rows(figures: Sequence[Sequence[float]], columns: int) -> tuple[list[str], list[list[str]]]:
    """Return a column per head if they fit, else minimum, median and maximum of each layer."""
    most = max(map(len, figures))
    if 7 * (most + 2) <= columns:
        rows = [[f"{figure:.2f}" for figure in row] + [""] * (most - len(row)) for row in figures]
        return [str(head) for head in range(most)], rows
    rows = []
    for row in figures:
        order = sorted(range(len(row)), key=row.__getitem__)
        low, high = (f"{row[head]:.2f} (head {head})" for head in (order[0], order[-1]))
        rows.append([low, f"{median(row):.2f}", high])
    return ["lowest", "median", "highest"], rows


def verdict(change: PrefixChange) -> str:
    """Return in one line whether a shared prefix has changed."""
    outcome = "unchanged" if change.unchanged else "CHANGED"
    tokens = "1 token" if change.n_token == 1 else f"{change.n_token} tokens"
    return f"shared prefix of {tokens}: rows {outcome}, within {change.largest:.1e} in all layers and heads"


def html(
    title: str, inspections: Sequence[Inspection], change: PrefixChange | None, layer: int, head: int
) -> str:
    """Return the whole page: the maps of every text."""
    figures = [
        maps.fragment(each.text[:200], each.tokens, each.maps, each.windows, layer=layer, head=head)
        for each in inspections
    ]
    paragraph = "" if change is None else f"<p>{verdict(change)}. {PREFIX}</p>\n"
    return page.page(title, paragraph + "".join(figures), maps.script())


def _window(window: int | None) -> str:
    return "" if window is None else f", window {window}"
