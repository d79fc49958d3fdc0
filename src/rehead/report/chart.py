"""What a chart shows, without how it is drawn: `plot` makes pictures of it, `interactive` something to hover over."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

COLOURS = ("#0072B2", "#C87A00", "#008F68", "#C2609B", "#2F96D0", "#D55E00", "#767676", "#000000")
"""Told apart by colour-blind readers: those of Okabe and Ito, the light ones darkened to 3:1 on white."""
DARK_COLOURS = ("#4BA3E3", "#F0B13C", "#2CC295", "#E39BC6", "#9AD4F7", "#FF8A4C", "#A6A6A6", "#F5F5F5")
"""The same on a dark page, one for one."""
DASHES = ("solid", "dash", "dashdot", "dot")
Marker = Literal["circle", "diamond", "star"]


@dataclass(frozen=True, kw_only=True)
class Look:
    """The colour and dash of one variant, the same in every chart of a report.

    `slot` is the colour's place in `COLOURS`, which a page shows as its own colour for each scheme.
    """

    slot: int
    dash: str

    @classmethod
    def of(cls, index: int) -> "Look":
        """Of the variant at `index`; after the last colour they come again, dashed."""
        return cls(slot=index % len(COLOURS), dash=DASHES[index // len(COLOURS) % len(DASHES)])

    @property
    def colour(self) -> str:
        """On white paper."""
        return COLOURS[self.slot]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one name: numbers, or for bars names on `y`. None is a gap.

    `low` and `high` span what several runs or rounds gave. `faint` draws it behind the others, without
    an entry in the legend; `pale` bars stand beside those that are not.
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

    @property
    def spans(self) -> bool:
        """Whether there is more than the middle to draw."""
        return list(self.low) != list(self.high)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines over x, single points, or bars along x with their names on y. `named` points bear their names."""

    kind: Literal["lines", "points", "bars"]
    x: str
    y: str
    series: Sequence[Series]
    title: str = ""
    log_x: bool = False
    named: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Charts that belong together, and what is to be said of them."""

    name: str
    title: str
    charts: Sequence[Chart]
    notes: Sequence[str] = ()
