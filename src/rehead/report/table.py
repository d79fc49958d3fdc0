"""Tables for the terminal and for documents."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 1000
NARROWEST = 24
"""Characters of a column of words, which wrap, before other columns give way; without those, half of it."""


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
    """Print a table on stdout; columns `texts` left, the rest right aligned, nothing cut off.

    Where the terminal is too narrow for all columns, the `optional` ones are left out, the last of them first;
    then several tables follow each other, and the first `keys` columns stand in each. Numbers stay whole;
    `texts` wrap.
    """
    console = Console(highlight=False)
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
        console.print(f"A wider terminal has room for {', '.join(out)} too.", style="dim")
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
    """The columns of each table, as many in one as have room."""
    begin = list(columns[:keys])
    found = [begin]
    for column in columns[keys:]:
        longer = _table(header, rows, texts, [*found[-1], column], least)
        if found[-1] != begin and not _fits(console, longer):
            found.append([*begin, column])
        else:
            found[-1] = [*found[-1], column]
    return found


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
