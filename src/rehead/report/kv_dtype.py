"""Plots loss against the bytes of the KV cache in several number formats."""

from collections.abc import Sequence
from typing import Any, get_args

from rehead.report.chart import Chart, Look, Marker, Panel, Series
from rehead.report.text import sanitise

Record = dict[str, Any]
TITLE = "Loss against KV bytes, by cache format"
NONE = "none"
"""In the table, for a format that a cache cannot have."""
MARKERS: tuple[Marker, ...] = get_args(Marker)
"""Of the variants, in their order."""


def panel(variants: Sequence[Record], *, source: Record | None, first_look: int) -> Panel:
    """Return a chart with a line per format and a point per variant, and its numbers as a table.

    Given the `source` of all variants, losses are shown minus its loss without rounding. `first_look` is the index
    of the first format's look.
    """
    measured = [variant for variant in variants if variant.get("kv_dtype")]
    names = list(dict.fromkeys(name for one in measured for name in _formats(one)))
    if measured and not names:
        return _impossible(measured)
    series = [
        _series(name, measured, source, Look.of(first_look + index)) for index, name in enumerate(names)
    ]
    over = "loss over the source" if source else "validation loss"
    chart = Chart(
        kind="points",
        x="KV cache, bytes per token" + ("" if source else " of a full context"),
        y=f"{over} (nats per token)",
        series=[one for one in series if one.x],
        log_x=True,
        named=True,
    )
    marks = "Every model has its mark."
    if len(measured) > len(MARKERS):
        marks = f"Marks repeat after {len(MARKERS)} models; the table has their names."
    notes = [
        "Lower and further left is better. A line is a format of the cache: every query reads keys and values, or "
        f"latents, rounded to it. {marks} Bytes include scales"
        + ("; losses are over that of the source without rounding." if source else "."),
        *_unable(measured),
    ]
    return Panel(
        name="kv_dtype",
        title=TITLE,
        charts=[chart],
        notes=notes,
        header=("Variant", *names) if measured else (),
        rows=[[one["variant"], *(_cell(one, name, source) for name in names)] for one in measured],
    )


def _impossible(variants: Sequence[Record]) -> Panel:
    """Return a panel without a chart, which says why no cache has any of the formats."""
    names = list(dict.fromkeys(name for one in variants for name in one["kv_dtype"]["unable"]))
    return Panel(
        name="kv_dtype",
        title=TITLE,
        charts=[],
        notes=["There is nothing to plot.", *_unable(variants)],
        header=("Variant", *names),
        rows=[[one["variant"], *(NONE for _ in names)] for one in variants],
    )


def size(variant: Record, name: str, source: Record | None) -> float:
    """Return the bytes per token of a variant's cache in a format; of a full context if there is no source."""
    found = variant["kv_dtype"]
    if source:
        return float(found["kv_bytes_per_token"][name])
    return float(found["cache_bytes"][name] / found["context"])


def losses(variant: Record, name: str, source: Record | None) -> list[float]:
    """Return the losses of all seeds in a format, over those of the source without rounding if there is one."""
    found: list[float] = variant["kv_dtype"]["losses"][name]
    if source is None:
        return found
    return [loss - before for loss, before in zip(found, source["kv_dtype"]["losses"][""], strict=True)]


def _formats(variant: Record) -> list[str]:
    return list(variant["kv_dtype"]["kv_bytes_per_token"])


def _series(name: str, variants: Sequence[Record], source: Record | None, look: Look) -> Series:
    able = sorted(
        (variant for variant in variants if name in _formats(variant)),
        key=lambda variant: size(variant, name, source),
    )
    values = [losses(variant, name, source) for variant in able]
    return Series(
        name=name,
        x=[size(variant, name, source) for variant in able],
        y=[sum(several) / len(several) for several in values],
        low=[min(several) for several in values],
        high=[max(several) for several in values],
        labels=[variant["variant"] for variant in able],
        markers=[MARKERS[variants.index(variant) % len(MARKERS)] for variant in able],
        look=look,
        joined=True,
    )


def _cell(variant: Record, name: str, source: Record | None) -> str:
    if name not in _formats(variant):
        return NONE
    values = losses(variant, name, source)
    mean = round(sum(values) / len(values), 4) + 0.0
    return f"{size(variant, name, source):,.0f} B, {mean:{'+' if source else ''}.4f}"


def _unable(variants: Sequence[Record]) -> list[str]:
    """Return a note on every format that caches cannot have, with the reason."""
    named: dict[tuple[str, str], list[str]] = {}
    for variant in variants:
        for fault in variant["kv_dtype"]["unable"].items():
            named.setdefault(fault, []).append(sanitise(variant["variant"]))
    return [
        f"No {sanitise(name)} for {', '.join(names)}: {sanitise(reason)}"
        for (name, reason), names in named.items()
    ]
