"""Tables for the terminal and for documents."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: str = "") -> None:
    """Print a table on stdout; the first column left, the rest right aligned, nothing cut off."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, Measurement.get(console, console.options, table).maximum)
    console.print(title, style="bold")
    console.print(table)
    if notes:
        console.print(notes, style="dim")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as Markdown."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
