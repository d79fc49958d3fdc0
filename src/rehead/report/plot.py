"""Draws charts as PNG images."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rehead.report.chart import Chart, Panel
from rehead.report.text import sanitise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LONGEST = 60
"""Characters of a name; a longer one would leave no room for the chart, and loses its middle."""
BESIDE = 8
"""Entries of the largest legend within a chart; a larger one is beside it."""
LETTER = 0.065
"""Width in inches of a letter of 8 points."""
THIN = "\u2009"
"""The thinnest space that every font has."""
STYLES = {"solid": "-", "dash": "--", "dashdot": "-.", "dot": ":"}
DOTS = {
    "solid": (0, (1, 2)),
    "dash": (0, (1, 5)),
    "dashdot": (0, (1, 2, 1, 6)),
    "dot": (0, (1, 2, 1, 2, 1, 6)),
}
FILLS = {"solid": "full", "dash": "none", "dashdot": "left", "dot": "bottom"}
HATCHES = {"solid": "", "dash": "//", "dashdot": "xx", "dot": ".."}
FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC", "WenQuanYi Micro Hei",
    "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo",
    "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Noto Emoji", "Symbola",
)  # fmt: skip
"""Fonts of other scripts, of Linux, Windows and macOS."""
MARKERS = {
    "circle": "o",
    "diamond": "D",
    "star": "*",
    "square": "s",
    "triangle": "^",
    "down": "v",
    "plus": "P",
    "cross": "X",
    "left": "<",
    "right": ">",
}


def draw(panel: Panel, path: Path) -> None:
    """Draw all charts of a panel side by side, as one image."""
    from matplotlib import rc_context

    with rc_context({"font.family": _fonts()}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")  # drawn as boxes
        _draw(panel, path)


def _fonts() -> list[str]:
    """Return matplotlib's font, and those of `FONTS` that are installed for what it lacks."""
    from matplotlib.font_manager import fontManager

    installed = set(fontManager.get_font_names())
    return ["DejaVu Sans", *(name for name in FONTS if name in installed)]


def _draw(panel: Panel, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_size(panel), layout="constrained")
    names: list[str] = []
    for axes, chart in zip(
        figure.subplots(1, len(panel.charts), squeeze=False)[0], panel.charts, strict=True
    ):
        named = _names(chart) != names  # bars like those to their left need no names
        names = _names(chart)
        {"lines": _lines, "points": _points, "bars": _bars}[chart.kind](axes, chart, named=named)
        axes.set_xlabel("\n".join([chart.x, *keys(chart)]))
        axes.grid(alpha=0.25, axis="x" if chart.kind == "bars" else "both")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(chart.title, loc="left", fontsize=10)
    figure.suptitle(_text(panel.title), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=110)


def _size(panel: Panel) -> tuple[float, float]:
    """Return width and height in inches, with room for long names and for legends beside their charts."""
    wide = 8.0 if len(panel.charts) == 1 else 4.6 * len(panel.charts)
    tall = 1.6 if all(chart.kind == "bars" for chart in panel.charts) else 4.8
    for chart in panel.charts:
        names = _names(chart) if chart.kind == "bars" else _entries(chart)
        longest = LETTER * max((len(_text(name)) for name in names), default=0)
        if chart.kind == "bars":
            wide += max(0.0, longest - 1.5) if chart is panel.charts[0] else 0.0
            tall = max(tall, 1.6 + 0.42 * len(names))
        elif len(names) > BESIDE:
            wide, tall = wide + longest + 1, max(tall, 1 + 0.18 * len(names))
    return wide, tall


def _entries(chart: Chart) -> list[str]:
    """Return the names in a chart's legend."""
    return [series.name for series in chart.series if not series.faint]


def _legend(axes: "Axes", chart: Chart, columns: int) -> None:
    """Draw the legend, if there is one: beside the chart where it would cover it."""
    if len(_entries(chart)) > BESIDE:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    elif axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, ncols=columns)


def _lines(axes: "Axes", chart: Chart, *, named: bool) -> None:
    for series in chart.series:
        colour, style = series.look.colour, (DOTS if series.faint else STYLES)[series.look.dash]
        last = next((y for y in reversed(series.y) if isinstance(y, float)), None)
        label = None if series.faint else _text(series.name) + ("" if last is None else f"  {last:.3f}")
        marker = "o" if len(series.x) == 1 else None
        axes.plot(
            series.x, _gaps(series.y), label=label, color=colour, linestyle=style, marker=marker,
            fillstyle=FILLS[series.look.dash], linewidth=0.9 if series.faint else 1.8, alpha=0.7 if series.faint else 1,
        )  # fmt: skip
        if series.spans:
            axes.fill_between(
                series.x, _gaps(series.low), _gaps(series.high), color=colour, alpha=0.15, linewidth=0
            )
    axes.set_ylabel(chart.y)
    _legend(axes, chart, 1)


def _points(axes: "Axes", chart: Chart, *, named: bool) -> None:
    from matplotlib.ticker import ScalarFormatter

    for series in chart.series:
        colour = series.look.colour
        if series.faint:
            axes.plot(series.x, series.y, color=colour, linestyle=DOTS[series.look.dash], linewidth=0.8)
            continue
        filled = FILLS[series.look.dash]
        if series.joined:
            style = STYLES[series.look.dash]
            axes.plot(series.x, series.y, style, color=colour, label=_text(series.name), linewidth=1.2)
        markers = series.markers or [series.marker] * len(series.x)
        for at, (x, y, marker) in enumerate(zip(series.x, series.y, markers, strict=True)):
            label = "_" if at or series.joined else _text(series.name)  # "_": no entry in the legend
            axes.plot(x, y, MARKERS[marker], color=colour, label=label, markersize=8, fillstyle=filled)
        if series.spans:
            axes.vlines(series.x, series.low, series.high, color=colour, linewidth=1.2)
    if any(series.labels for series in chart.series):
        _labels(axes, chart)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        low, high = axes.get_xlim()
        if sum(low <= tick <= high for tick in axes.get_xticks()) < 2:  # powers of two
            axes.set_xticks(sorted({x for series in chart.series for x in series.x}))
    axes.set_ylabel(chart.y)
    _legend(axes, chart, 2)


def _labels(axes: "Axes", chart: Chart) -> None:
    """Write the label of every point above it, each label once."""
    axes.margins(x=0.12)
    points = {
        label: (x, y)
        for series in reversed(chart.series)
        for label, x, y in zip(series.labels, series.x, series.y, strict=False)
    }
    for label, point in points.items():
        axes.annotate(_text(label), point, (6, 7), textcoords="offset points", fontsize=8)


def _bars(axes: "Axes", chart: Chart, *, named: bool) -> None:
    names = _names(chart)
    shades = sorted({series.pale for series in chart.series})
    thick = 0.75 / len(shades)
    for series in chart.series:
        shift = (shades.index(series.pale) - (len(shades) - 1) / 2) * thick
        places = [names.index(str(name)) + shift for name in series.y]
        axes.barh(
            places, series.x, thick, color=series.look.colour, alpha=0.45 if series.pale else 1,
            hatch=HATCHES[series.look.dash], edgecolor="white", linewidth=0,
        )  # fmt: skip
        if series.spans:
            axes.hlines(places, series.low, series.high, color="#444444", linewidth=1.2)
    axes.set_yticks(range(len(names)), [_text(name) for name in names] if named else [""] * len(names))
    axes.set_ylim(len(names) - 0.5, -0.5)


def keys(chart: Chart) -> list[str]:
    """Return the lines of a key: what full and pale bars stand for, or dotted lines."""
    by_shade = {series.pale: series.name for series in chart.series}
    if len(by_shade) == 2:
        return [f"full: {by_shade[False]}; pale: {by_shade[True]}"]
    return [f"dotted: {chart.faint}"] if chart.faint and any(series.faint for series in chart.series) else []


def _names(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(name) for series in chart.series for name in series.y))


def _gaps(values: Sequence[Any]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _text(text: str) -> str:
    """Escape what matplotlib would not show: dollar signs are formulas, a name after "_" is in no legend."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[1 - LONGEST // 2 :]}"
    shown = sanitise(short).replace("$", r"\$")
    return f"{THIN}{shown}" if shown.startswith("_") else shown
