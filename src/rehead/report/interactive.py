"""Charts in a page: bars as HTML, lines and points as data that interactive.js draws as SVG.

`fragment` returns one figure, for a page that contains `script()` once. Colours are CSS classes (`c0`, `c1`, ...)
whose values depend on the page's colour scheme, so that charts, swatches and legends always agree.
"""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rehead.report.chart import COLOURS, DARK_COLOURS, Chart, Look, Series
from rehead.report.text import sanitise

Table = dict[str, Any]


def fragment(chart: Chart) -> str:
    """Return one figure as HTML. Names and titles may be untrusted text."""
    unit = f" <small>{_text(chart.x)}</small>" if chart.kind == "bars" else ""
    title = f"<figcaption>{_text(chart.title)}{unit}</figcaption>\n" if chart.title or unit else ""
    if chart.kind == "bars":
        return f'<figure class="chart bars">{title}{_bars(chart)}</figure>\n'
    data = escape(json.dumps(table(chart), allow_nan=False))
    return (
        f'<figure class="chart {chart.kind}" data-chart="{data}">{title}'
        "<noscript>This chart needs JavaScript, which is off; the tables, or curves.csv and the images beside this "
        "page, have the numbers.</noscript></figure>\n"
    )


def script() -> str:
    """Return the script and style of the figures, which a page needs once."""
    style, code = ((files("rehead.report") / f"interactive.{kind}").read_text() for kind in ("css", "js"))
    return f"<style>{palette()}{style}</style>\n<script>{code}</script>\n"


def palette() -> str:
    """Return the colour of every class `c0`, `c1`, ... for light pages, paper and dark pages."""
    classes = "".join(f".c{slot} {{ --c: var(--c{slot}); }}\n" for slot in range(len(COLOURS)))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_slots(DARK_COLOURS)} }} }}\n"
    return f":root {{ {_slots(COLOURS)} }}\n{dark}{classes}"


def swatch(look: Look) -> str:
    """Return a small square in a variant's colour, hatched if the colour repeats."""
    return f'<i class="swatch c{look.slot} {look.dash}" aria-hidden="true"></i>'


def table(chart: Chart) -> Table:
    """Return the data for interactive.js: plain numbers and texts, None for a gap."""
    return {
        "kind": chart.kind,
        "x": chart.x,
        "y": chart.y,
        "logX": chart.log_x,
        "named": chart.named,
        "label": described(chart),
        "series": [_series(series) for series in chart.series],
    }


def described(chart: Chart) -> str:
    """Describe a chart in words for screen readers: the last value of every line, or every point."""
    shown = [series for series in chart.series if not series.faint and series.y]
    if chart.kind == "points":
        ends = [
            f"{sanitise(_name(series, at))} {_number(y)} at {_number(series.x[at])}"
            for series in shown
            for at, y in enumerate(finite(series.y))
            if y is not None
        ]
        return f"{chart.y} over {chart.x}; points: {'; '.join(ends)}"
    last = [(series.name, finite(series.y)[-1]) for series in shown]
    ends = [f"{sanitise(name)} {_number(y)}" for name, y in last if y is not None]
    return f"{chart.y} over {chart.x}; ends of lines: {'; '.join(ends)}"


def _name(series: Series, at: int) -> str:
    """Return the name of a point."""
    return f"{series.labels[at]}, {series.name}" if series.labels else series.name


def finite(values: Iterable[Any]) -> list[Any]:
    """Return the values, with None (a gap) for NaN and infinities, which JSON lacks."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _series(series: Series) -> Table:
    spans = {"low": finite(series.low), "high": finite(series.high)} if series.spans else {}
    return {
        "name": sanitise(series.name),
        "x": finite(series.x),
        "y": finite(series.y),
        "slot": series.look.slot,
        "dash": series.look.dash,
        "marker": series.marker,
        "faint": series.faint,
        "joined": series.joined,
        "markers": list(series.markers),
        "labels": [sanitise(label) for label in series.labels],
        **spans,
    }


def _bars(chart: Chart) -> str:
    """Return rows with a name and its bars, each bar with its value."""
    most = max((value for series in chart.series for value in (*series.x, *series.high)), default=0) or 1
    rows: dict[str, list[str]] = {}
    for series in chart.series:
        for at, name in enumerate(series.y):
            rows.setdefault(str(name), []).append(_bar(series, at, most))
    body = "".join(f"<div><dt>{_text(name)}</dt>{''.join(bars)}</div>\n" for name, bars in rows.items())
    return f"<dl>\n{body}</dl>"


def _bar(series: Series, at: int, most: float) -> str:
    value = series.x[at]
    span = whisker = ""
    if series.spans:
        low, high = series.low[at], series.high[at]
        span = f" <small>{_number(low)}–{_number(high)}</small>"
        whisker = f'<i style="left: {100 * low / most:.2f}%; width: {100 * (high - low) / most:.2f}%"></i>'
    name = f" <small>{_text(series.name)}</small>" if series.name else ""
    pale = " pale" if series.pale else ""
    return (
        f'<dd><span class="track" aria-hidden="true"><b class="c{series.look.slot} {series.look.dash}{pale}" '
        f'style="width: {100 * value / most:.2f}%"></b>{whisker}</span>'
        f'<span class="value">{_number(value)}{span}{name}</span></dd>'
    )


def _number(value: Any) -> str:
    """Format four digits, or all digits before the point."""
    if not isinstance(value, int | float):
        return sanitise(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _text(text: object) -> str:
    return escape(sanitise(text), quote=False)


def _slots(colours: Sequence[str]) -> str:
    return " ".join(f"--c{slot}: {colour};" for slot, colour in enumerate(colours))
