"""The data of charts, without drawing: `plot` makes images of them, `interactive` figures for a page."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

COLOURS = ("#0072B2", "#C87A00", "#008F68", "#C2609B", "#2F96D0", "#D55E00", "#767676", "#000000")
"""Colours that colour-blind readers can distinguish: those of Okabe and Ito, darkened to 3:1 on white."""
DARK_COLOURS = ("#4BA3E3", "#F0B13C", "#2CC295", "#E39BC6", "#9AD4F7", "#FF8A4C", "#A6A6A6", "#F5F5F5")
"""The same colours for a dark page, in the same order."""
DASHES = ("solid", "dash", "dashdot", "dot")
Marker = Literal["circle", "diamond", "star", "square", "triangle", "down", "plus", "cross", "left", "right"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """The colour and dash of one variant, the same in every chart of a report.

    `slot` is the index in `COLOURS`, or in `DARK_COLOURS` on a dark page.
    """

    slot: int
    dash: str

    @classmethod
    def of(cls, index: int) -> "Look":
        """Return the look of the variant at `index`; after the last colour, colours repeat with a dash."""
        return cls(slot=index % len(COLOURS), dash=DASHES[index // len(COLOURS) % len(DASHES)])

    @property
    def colour(self) -> str:
        """Return the colour on white."""
        return COLOURS[self.slot]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A named series of numbers; for bars, `y` has names. None is a gap.

    `low` and `high` are the range over several runs or rounds. A `faint` series is drawn behind the others,
    without an entry in the legend; `pale` bars are drawn beside the others. Points may have `labels` and
    `markers` of their own; they are connected if they are `joined`.
    """

    name: str
    x: Sequence[Any]
    y: Sequence[Any]
    low: Sequence[Any] = ()
    high: Sequence[Any] = ()
    look: Look = field(default_factory=lambda: Look.of(0))
    marker: Marker = "circle"
    faint: bool = False
    pale: bool = False
    joined: bool = False
    labels: Sequence[str] = ()
    markers: Sequence[Marker] = ()

    @property
    def spans(self) -> bool:
        """Return True if there is a range to draw."""
        return list(self.low) != list(self.high)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over x, single points, or bars along x with names on y.

    `named` writes names beside points: that of their series, or their labels, each once. `faint` says what faint series
    are, to a reader of the image alone.
    """

    kind: Literal["lines", "points", "bars"]
    x: str
    y: str
    series: Sequence[Series]
    title: str = ""
    log_x: bool = False
    named: bool = False
    faint: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Charts that belong together, with notes, and their numbers as a table if it has a `header`."""

    name: str
    title: str
    charts: Sequence[Chart]
    notes: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
