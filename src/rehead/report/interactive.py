"""Charts in a page: bars as HTML, lines and points as data that interactive.js draws as SVG.

`fragment` is one figure, for any page that has `script()` in it once. Colours are classes (`c0`, `c1`, ...)
whose values the page's scheme decides, so that charts, swatches and legends always agree.
"""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from rehead.report.chart import COLOURS, DARK_COLOURS, Chart, Look, Series
from rehead.report.text import harmless

Table = dict[str, Any]


def fragment(chart: Chart) -> str:
    """One figure of HTML. Names and titles may be untrusted text."""
    unit = f" <small>{_text(chart.x)}</small>" if chart.kind == "bars" else ""
    title = f"<figcaption>{_text(chart.title)}{unit}</figcaption>\n" if chart.title or unit else ""
    if chart.kind == "bars":
        return f'<figure class="chart bars">{title}{_bars(chart)}</figure>\n'
    data = escape(json.dumps(table(chart), allow_nan=False))
    return (
        f'<figure class="chart {chart.kind}" data-chart="{data}">{title}'
        "<noscript>JavaScript, which is off, draws this chart; the tables have the numbers.</noscript></figure>\n"
    )


def script() -> str:
    """What draws the figures, and their style; once a page."""
    style, code = ((files("rehead.report") / f"interactive.{kind}").read_text() for kind in ("css", "js"))
    return f"<style>{palette()}{style}</style>\n<script>{code}</script>\n"


def palette() -> str:
    """The colour of every class `c0`, `c1`, ... on a light page, on paper, and on a dark page."""
    classes = "".join(f".c{slot} {{ --c: var(--c{slot}); }}\n" for slot in range(len(COLOURS)))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_slots(DARK_COLOURS)} }} }}\n"
    return f":root {{ {_slots(COLOURS)} }}\n{dark}{classes}"


def swatch(look: Look) -> str:
    """A small square in a variant's colour, hatched where colours come again."""
    return f'<i class="swatch c{look.slot} {look.dash}" aria-hidden="true"></i>'


def table(chart: Chart) -> Table:
    """What interactive.js reads: plain numbers and texts, None where there is a gap."""
    return {
        "kind": chart.kind,
        "x": chart.x,
        "y": chart.y,
        "logX": chart.log_x,
        "named": chart.named,
        "label": described(chart),
        "series": [_series(one) for one in chart.series],
    }


def described(chart: Chart) -> str:
    """A chart in words, for readers who do not see it: the last value of every line, every point."""
    ends = [
        f"{harmless(one.name)} {_number(one.y[-1])}"
        + (f" at {_number(one.x[-1])}" if chart.kind == "points" else "")
        for one in chart.series
        if not one.faint and one.y and one.y[-1] is not None
    ]
    what = "ends of lines" if chart.kind == "lines" else "points"
    return f"{chart.y} over {chart.x}; {what}: {'; '.join(ends)}"


def finite(values: Iterable[Any]) -> list[Any]:
    """The values, with None (a gap) for NaN and infinities, which JSON cannot say."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _series(series: Series) -> Table:
    spans = {"low": finite(series.low), "high": finite(series.high)} if series.spans else {}
    return {
        "name": harmless(series.name),
        "x": finite(series.x),
        "y": finite(series.y),
        "slot": series.look.slot,
        "dash": series.look.dash,
        "marker": series.marker,
        "faint": series.faint,
        **spans,
    }


def _bars(chart: Chart) -> str:
    """A name and its bars in each row, the value written beside every bar."""
    most = max((value for one in chart.series for value in (*one.x, *one.high)), default=0) or 1
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
    """Four digits, or all before the point."""
    if not isinstance(value, int | float):
        return harmless(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


def _text(text: object) -> str:
    return escape(harmless(text), quote=False)


def _slots(colours: Sequence[str]) -> str:
    return " ".join(f"--c{slot}: {colour};" for slot, colour in enumerate(colours))
