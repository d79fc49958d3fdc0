"""Charts as Plotly draws them in a browser: plain tables of data and layout."""

import html
import math
from collections.abc import Sequence
from typing import Any

from rehead.report.chart import Chart, Series
from rehead.report.text import harmless

Table = dict[str, Any]
PATTERNS = {"solid": "", "dash": "/", "dashdot": "x", "dot": "."}
"""Of bars, where colours come again."""
BAR, ROW = 22, 30
"""Heights in pixels, of a bar and of a row of text."""


def figure(chart: Chart) -> Table:
    """`data` and `layout`; colours of text and grid are the page's, so that they follow its theme."""
    draw = {"lines": _line, "points": _point, "bars": _bar}[chart.kind]
    data = [trace for series in chart.series for trace in draw(series)]
    layout: Table = {
        "xaxis": {"title": {"text": plain(chart.x)}, "automargin": True},
        "yaxis": {"title": {"text": plain(chart.y)}, "automargin": True},
        "margin": {"l": 12, "r": 16, "t": 12, "b": 12},
        "hovermode": "closest",
        "showlegend": chart.kind != "bars",
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "height": 420,
    }
    if chart.log_x:
        values = [x for series in chart.series for x in series.x if isinstance(x, int | float) and x > 0]
        layout["xaxis"] |= {
            "type": "log",
            "tickvals": _powers(values),
            "ticktext": [_count(x) for x in _powers(values)],
        }
    if chart.kind == "bars":
        names = len({name for series in chart.series for name in series.y})
        groups = len({series.pale for series in chart.series})
        layout |= {"height": 2 * ROW + names * (BAR * groups + 8) + 24, "barmode": "group", "bargap": 0.25}
        layout["yaxis"] |= {"autorange": "reversed", "title": {"text": ""}}
        layout["xaxis"] |= {"rangemode": "tozero"}
    return {"data": data, "layout": layout}


def plain(text: object) -> str:
    """Text that Plotly shows as it is; it would take tags and links in it for its own."""
    return html.escape(harmless(text), quote=False)


def finite(values: Sequence[Any]) -> list[Any]:
    """The values, with None (a gap) for NaN and infinities, which JSON cannot say."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _line(series: Series) -> list[Table]:
    name, look = plain(series.name), series.look
    width = 1.2 if series.faint else 2.4
    line = {
        "type": "scatter",
        "mode": "lines+markers" if len(series.x) == 1 else "lines",
        "name": name,
        "legendgroup": name,
        "showlegend": not series.faint,
        "x": finite(series.x),
        "y": finite(series.y),
        "line": {"color": look.colour, "width": width, "dash": "dot" if series.faint else look.dash},
        "opacity": 0.75 if series.faint else 1,
        "hovertemplate": f"{name}{', train' if series.faint else ''}<br>step %{{x:,}}: %{{y:.4f}}<extra></extra>",
    }
    if not series.spans:
        return [line]
    edge = {
        "type": "scatter",
        "mode": "lines",
        "legendgroup": name,
        "showlegend": False,
        "hoverinfo": "skip",
        "line": {"width": 0, "color": look.colour},
        "x": finite(series.x),
    }
    red, green, blue = (int(look.colour[at : at + 2], 16) for at in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.18)"}
    return [edge | {"y": finite(series.low)}, edge | fill | {"y": finite(series.high)}, line]


def _point(series: Series) -> list[Table]:
    name, colour = plain(series.name), series.look.colour
    point: Table = {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": finite(series.x),
        "y": finite(series.y),
        "marker": {
            "color": colour,
            "symbol": series.marker + ("-open" if series.look.dash != "solid" else ""),
            "size": 13,
            "line": {"width": 2, "color": colour},
        },
        "hovertemplate": f"{name}<br>%{{x:,}} bytes per token<br>loss %{{y:.4f}}<extra></extra>",
    }
    if series.faint:
        point |= {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
        point["line"] = {"color": colour, "width": 1, "dash": "dot"}
    elif series.spans:
        point["error_y"] = _whiskers(series, series.y, colour)
    return [point]


def _bar(series: Series) -> list[Table]:
    name, colour = plain(series.name), series.look.colour
    bar: Table = {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "offsetgroup": "pale" if series.pale else "full",
        "x": finite(series.x),
        "y": [plain(label) for label in series.y],
        "marker": {
            "color": colour,
            "opacity": 0.45 if series.pale else 1,
            "pattern": {"shape": PATTERNS[series.look.dash]},
        },
        "hovertemplate": f"%{{y}}<br>{name}: %{{x:,.4~g}}<extra></extra>",
    }
    if series.spans:
        bar["error_x"] = _whiskers(series, series.x, "#888888")
    return [bar]


def _whiskers(series: Series, middle: Sequence[Any], colour: str) -> Table:
    above = [high - value for high, value in zip(series.high, middle, strict=True)]
    below = [value - low for low, value in zip(series.low, middle, strict=True)]
    return {
        "type": "data",
        "symmetric": False,
        "array": above,
        "arrayminus": below,
        "color": colour,
        "thickness": 1.2,
        "width": 4,
    }


def _powers(values: Sequence[float]) -> list[float]:
    """Powers of two that span the values."""
    if not values:
        return []
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    return [2.0**power for power in range(low, high + 1)]


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
