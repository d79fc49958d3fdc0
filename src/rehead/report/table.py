"""Prints tables on the terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rehead.report.text import inert

WIDEST = 1000
NARROWEST = 24
"""Minimum characters of a text column before other columns are dropped; after that, half of it."""


def show(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: str = "",
    *,
    texts: Sequence[int] = (0,),
    keys: int = 1,
    optional: Sequence[int] = (),
) -> None:
    """Print a table on stdout; columns `texts` are left-aligned and wrap, the others are right-aligned.

    If the terminal is too narrow, `optional` columns are left out, the last of them first; then the table is
    split into several, each with the first `keys` columns. Numbers are never cut.
    """
    title, notes = inert(title), inert(notes)
    header, rows = [*map(inert, header)], [[*map(inert, row)] for row in rows]
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold")
    columns, least, spare = list(range(len(header))), NARROWEST, list(optional)
    while spare and not _fits(console, _table(header, rows, texts, columns, least)):
        columns.remove(spare.pop())
    if optional and not _fits(console, _table(header, rows, texts, columns, least)):
        least //= 2
    for some in _fitting(console, header, rows, texts, columns, keys, least):
        console.print(_table(header, rows, texts, some, least))
    out = [name.replace("\n", "") for index, name in enumerate(header) if index not in columns]
    if out:
        console.print(f"A wider terminal, or COLUMNS=160, also shows {', '.join(out)}.", style="dim")
    if notes:
        console.print(" ".join(notes.split()), style="dim")


def _fits(console: Console, table: Table) -> bool:
    need = Measurement.get(console, console.options.update(max_width=WIDEST), table).minimum
    return need <= console.width


def _fitting(
    console: Console,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[int],
    columns: Sequence[int],
    keys: int,
    least: int,
) -> list[list[int]]:
    """Return the columns of each table, as many as fit."""
    begin = list(columns[:keys])
    tables = [begin]
    for column in columns[keys:]:
        wider = _table(header, rows, texts, [*tables[-1], column], least)
        if tables[-1] != begin and not _fits(console, wider):
            tables.append([*begin, column])
        else:
            tables[-1] = [*tables[-1], column]
    return tables


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    texts: Sequence[int],
    columns: Sequence[int],
    least: int,
) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        wraps = column in texts
        words = [*header[column].splitlines(), *(row[column] for row in rows)]
        longest = max(map(len, words), default=0)
        table.add_column(
            header[column],
            justify="left" if column in texts else "right",
            no_wrap=not wraps,
            min_width=min(longest, least) if wraps else longest,
        )
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table
